"""Arithmetic word problems with their answers, English and Korean. Data only.

The numbers of a problem are drawn as a, b, c from its ranges; a text may also use the derived numbers ab = a * b,
bc = b * c, abc = a * b * c and a_plus_b, so that every division comes out even.
"""

from collections.abc import Callable
from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """`solve(a, b, c)` is the answer; ranges are inclusive."""

    text: str
    solve: Callable[[int, int, int], int]
    a: Range = (2, 12)
    b: Range = (2, 12)
    c: Range = (2, 12)


ITEMS = (
    "apples", "stickers", "marbles", "pencils", "postcards", "cookies", "seashells", "coins", "buttons", "candles",
    "stamps", "beads",
    "balloons", "notebooks", "tulips", "oranges", "muffins", "badges", "lemons", "crayons", "ribbons", "plums", "tiles",
    "keys", "figs",
    "cupcakes", "paper cranes", "toy cars", "picture frames", "jars of honey", "bananas", "pears", "peaches", "carrots",
    "onions", "eggs", "loaves of bread", "bottles of milk", "cans of soup", "bags of rice", "spoons", "plates", "cups",
    "chairs", "lamps", "mirrors", "blankets", "pillows", "towels", "socks", "shirts", "hats", "scarves", "gloves",
    "shoes",
    "necklaces", "rings", "bracelets", "books", "magazines", "letters", "envelopes", "photographs", "paintings",
    "brushes", "pens", "erasers", "rulers", "markers", "bricks", "nails", "screws", "planks", "ropes", "bottles",
    "baskets", "flowers", "roses", "trees", "seeds", "leaves", "pebbles", "kites", "dolls", "puzzles", "robots",
    "drums",
    "flutes", "tickets", "maps", "flags", "lanterns", "batteries", "cables", "wheels", "sandwiches", "pizzas", "pies",
    "biscuits", "chocolates", "sweets", "doughnuts", "pancakes", "olives", "cherries", "grapes", "melons", "tomatoes",
)  # fmt: skip

PROBLEMS = (
    Problem("{person} has {a} boxes with {b} {item} in each, and {c} loose {item}. How many {item} are there in all?",
            lambda a, b, c: a * b + c),
    Problem("{person} had {abc} {item} and shared them equally among {a} friends. How many did each friend get?",
            lambda a, b, c: b * c),
    Problem("A shop sells {item} at {a} coins each. {person} buys {b} of them and pays with {ab} coins plus a tip of "
            "{c} coins. "
            "How many coins did {person} spend?", lambda a, b, c: a * b + c),
    Problem("{person} collects {a} {item} every day. After {b} days, {person} gives {c} of them away. How many are "
            "left?",
            lambda a, b, c: a * b - c, a=(5, 20), b=(3, 14), c=(2, 14)),
    Problem("There are {a} rows of chairs in the hall of {town}, with {b} chairs in a row. {c} chairs are broken. "
            "How many can be used?", lambda a, b, c: a * b - c, a=(6, 20), b=(5, 18), c=(2, 20)),
    Problem("A bus leaves {town} with {a} people. At the first stop {b} get off and {c} get on. How many are on the "
            "bus now?",
            lambda a, b, c: a - b + c, a=(20, 60), b=(3, 18), c=(2, 25)),
    Problem("{person} reads {a} pages an hour. How many hours are needed for a book of {abc} pages?",
            lambda a, b, c: b * c),
    Problem("A train travels {a} kilometres in an hour. How far does it go in {b} hours, and how far if it then "
            "travels {c} more "
            "kilometres?", lambda a, b, c: a * b + c, a=(40, 120), b=(2, 6), c=(5, 50)),
    Problem("{person} earns {a} coins an hour and works {b} hours a day for {c} days. How much does {person} earn?",
            lambda a, b, c: a * b * c),
    Problem("A recipe for {a} people needs {ab} {item}. How many {item} are needed for {c} people?",
            lambda a, b, c: b * c),
    Problem("{person} is {a} years old. {other} is {b} years older than twice that age. How old is {other}?",
            lambda a, b, c: 2 * a + b),
    Problem("Together {person} and {other} have {a_plus_b} {item}. {person} has {a}. How many more would {other} need "
            "to have "
            "{c} dozen?", lambda a, b, c: 12 * c - b, c=(2, 9)),
    Problem("A garden in {town} is {a} metres long and {b} metres wide. A fence costs {c} coins a metre. What does it "
            "cost to fence "
            "the whole garden?", lambda a, b, c: 2 * (a + b) * c),
    Problem("A tank holds {abc} litres. A pump empties {a} litres a minute. How many minutes until it is empty?",
            lambda a, b, c: b * c),
    Problem("{person} saves {a} coins each week and already has {b}. How many coins will {person} have after {c} "
            "weeks?",
            lambda a, b, c: a * c + b, b=(10, 90)),
    Problem("{person} buys {a} bags of {item} for {b} coins each and sells them all for {ab} coins more than they "
            "cost. "
            "How many coins did {person} receive?", lambda a, b, c: 2 * a * b),
    Problem("In a class of {a_plus_b} pupils in {town}, {a} play chess and the rest play the piano. Each pianist "
            "practises {c} hours "
            "a week. How many hours of piano is that in a week?", lambda a, b, c: b * c),
    Problem("A baker in {town} makes {a} trays of {b} {item}. {c} trays are sold before noon. How many {item} remain?",
            lambda a, b, c: (a - c) * b, a=(9, 20), c=(2, 8)),
    Problem("What is {a} times {b}, minus {c}?", lambda a, b, c: a * b - c, a=(11, 40), b=(3, 19), c=(2, 30)),
    Problem("Work out ({a} + {b}) x {c}.", lambda a, b, c: (a + b) * c, a=(11, 90), b=(11, 90)),
    Problem("A phone plan costs {a} coins a month plus {b} coins for each gigabyte. {person} used {c} gigabytes. What "
            "is the bill?",
            lambda a, b, c: a + b * c, a=(8, 40)),
    Problem("{person} walks {a} laps of {b} metres each, and {other} walks {c} laps fewer. How many metres does "
            "{other} walk?",
            lambda a, b, c: (a - c) * b, a=(10, 25), b=(100, 400), c=(2, 8)),
    Problem("A parcel of {item} weighs {a} kilograms. The van from {town} carries {b} parcels a trip and makes {c} "
            "trips. "
            "How many kilograms is that?", lambda a, b, c: a * b * c),
    Problem("{person} cuts a rope of {ab} metres into pieces of {a} metres. How many cuts are needed?",
            lambda a, b, c: b - 1),
    Problem("The museum of {town} had {a} visitors on Saturday and {b} times as many on Sunday. Tickets cost {c} "
            "coins. "
            "How much did both days bring in?", lambda a, b, c: a * (1 + b) * c, a=(20, 90), b=(2, 4)),
    Problem("{person} had {a} {item} and bought {b} more. Then {c} of them broke. How many {item} does {person} "
            "have now?",
            lambda a, b, c: a + b - c, a=(10, 60), b=(5, 40), c=(2, 9)),
    Problem("{person} has {a} times as many {item} as {other}. {other} has {b}. How many do they have together?",
            lambda a, b, c: (a + 1) * b),
    Problem("{person} bakes {a} {item} on Monday, twice as many on Tuesday and {b} on Wednesday. How many is that "
            "in all?",
            lambda a, b, c: 3 * a + b, a=(5, 40), b=(3, 50)),
    Problem("A box of {item} costs {a} coins. {person} has {b} coins and gets {c} more. How many coins are left after "
            "buying one box?", lambda a, b, c: b + c - a, a=(3, 12), b=(12, 40)),
    Problem("{person} drinks {a} glasses of water a day. How many glasses is that in {b} weeks?",
            lambda a, b, c: 7 * a * b),
    Problem("A school in {town} has {a} classes with {b} pupils each. {c} pupils are ill today. How many came to "
            "school?",
            lambda a, b, c: a * b - c, a=(4, 15), b=(18, 30)),
    Problem("{person} plants {a} rows of {b} {item}. Birds take {c} of them. How many stay in the ground?",
            lambda a, b, c: a * b - c, a=(4, 15), b=(4, 15)),
    Problem("A cinema sells {a} tickets for adults at {b} coins and {c} tickets for children at one coin. How much "
            "does "
            "it take?", lambda a, b, c: a * b + c, a=(10, 60)),
    Problem("{person} runs {a} kilometres every day for {b} days and then rests for {c} days. How far did {person} "
            "run?",
            lambda a, b, c: a * b),
    Problem("It takes {a} minutes to paint one of the {item}. How many minutes does it take to paint {b} of them "
            "and to "
            "clean up for {c} minutes?", lambda a, b, c: a * b + c),
    Problem("{person} has a shelf with {a} books. {b} are novels, and the rest are about {town}. How many books are "
            "about "
            "{town}?", lambda a, b, c: a - b, a=(30, 90), b=(5, 28)),
    Problem("A farmer near {town} collects {a} eggs from each of {b} hens and sells {c} of the eggs. How many eggs are "
            "left?", lambda a, b, c: a * b - c, a=(4, 12), b=(4, 12), c=(2, 14)),
    Problem("{person} wants to buy a bicycle for {abc} coins and saves {a} coins a day. How many days does that take?",
            lambda a, b, c: b * c),
    Problem("A ferry carries {a} cars on each trip. How many trips are needed for {ab} cars, and how many for {c} "
            "times as "
            "many?", lambda a, b, c: b * c),
    Problem("{person} cuts a cake into {ab} pieces and eats {b} of them. How many pieces remain?",
            lambda a, b, c: a * b - b),
    Problem("{other} is {a} centimetres tall. {person} is {b} centimetres taller. How tall is {person}?",
            lambda a, b, c: a + b, a=(90, 160), b=(3, 30)),
    Problem("There are {a} {item} in a red bag and {b} in a blue bag. {person} moves {c} from the red bag to the "
            "blue one. "
            "How many are in the blue bag then?", lambda a, b, c: b + c, a=(20, 50), b=(5, 40), c=(2, 15)),
    Problem("A printer prints {a} pages a minute. How many pages does it print in {b} minutes if {c} pages jam?",
            lambda a, b, c: a * b - c, a=(8, 30)),
    Problem("{person} buys {a} {item} at {b} coins each and pays with a note of {abc} coins. What is the change?",
            lambda a, b, c: a * b * c - a * b),
    Problem("The temperature in {town} was {a} degrees in the morning, rose by {b} degrees and then fell by {c}. "
            "How warm "
            "was it in the end?", lambda a, b, c: a + b - c, a=(5, 20)),
    Problem("{person} reads {a} pages on the first day and {b} pages more on each of the next two days. How many "
            "pages is "
            "that?", lambda a, b, c: 3 * a + 2 * b, a=(10, 40)),
    Problem("Each of {a} teams has {b} players and {c} coaches. How many people is that?", lambda a, b, c: a * (b + c)),
    Problem("A car uses {a} litres for a hundred kilometres. How many litres does it use for {b} hundred kilometres?",
            lambda a, b, c: a * b),
    Problem("{person} gives {a} {item} to each of {b} friends and keeps {c}. How many were there at the start?",
            lambda a, b, c: a * b + c),
    Problem("A rectangle is {a} centimetres long and {b} centimetres wide. What is its area?", lambda a, b, c: a * b),
    Problem("A square has sides of {a} metres. What is its perimeter?", lambda a, b, c: 4 * a),
    Problem("{person} sleeps {a} hours a night. How many hours is that in {b} nights?", lambda a, b, c: a * b,
            a=(6, 10)),
    Problem("A library in {town} lends {a} books on each weekday and {b} on Saturday. How many books is that in a week "
            "that is closed on Sunday?", lambda a, b, c: 5 * a + b, a=(20, 90), b=(10, 99)),
    Problem("{person} and {other} pick {abc} {item} together and put {a} into each basket. How many baskets do they "
            "fill?",
            lambda a, b, c: b * c),
    Problem("A string of {a} lights has {b} broken ones. How many lights work on {c} such strings?",
            lambda a, b, c: (a - b) * c, a=(20, 60)),
    Problem("{person} is twice as old as {other}, who is {a}. How old will {person} be in {b} years?",
            lambda a, b, c: 2 * a + b),
    Problem("A baker uses {a} grams of sugar for one cake. How many grams are left of {abc} grams after {b} cakes?",
            lambda a, b, c: a * b * c - a * b),
    Problem("{person} walks {a} steps a minute for {b} minutes. How many steps is that?", lambda a, b, c: a * b,
            a=(60, 120)),
    Problem("In a parking lot in {town} there are {a} cars and {b} motorcycles. How many wheels is that?",
            lambda a, b, c: 4 * a + 2 * b),
    Problem("A ticket to {town} costs {a} coins. A group of {b} people gets {c} coins off the total. What does the "
            "group "
            "pay?", lambda a, b, c: a * b - c, a=(10, 40)),
    Problem("{person} types {a} words a minute. How many words is that in {b} minutes, without the {c} that were "
            "deleted?",
            lambda a, b, c: a * b - c, a=(20, 60)),
    Problem("{person} has {a} coins of value {b} and {c} coins of value one. What are they worth together?",
            lambda a, b, c: a * b + c),
    Problem("A river near {town} rises by {a} centimetres an hour for {b} hours and then falls by {c} centimetres. "
            "By how "
            "much is it higher than before?", lambda a, b, c: a * b - c, a=(3, 12), b=(4, 12), c=(2, 10)),
    Problem("{person} needs {a} beads for one bracelet. How many bracelets can be made from {abc} beads?",
            lambda a, b, c: b * c),
    Problem("A lift carries {a} people at once. How many rides does it take to bring {ab} people up, and how many in "
            "all if it then makes {c} more?", lambda a, b, c: b + c),
    Problem("{a} workers build a wall in {b} days. How many days of work is that for one worker alone?",
            lambda a, b, c: a * b),
    Problem("{person} solved {a} puzzles in March, {b} in April and {c} in May. How many is that on the whole?",
            lambda a, b, c: a + b + c, a=(5, 60), b=(5, 60), c=(5, 60)),
    Problem("Add {a}, {b} and {c}.", lambda a, b, c: a + b + c, a=(11, 90), b=(11, 90), c=(11, 90)),
    Problem("Subtract {b} from {a} and multiply the result by {c}.",
            lambda a, b, c: (a - b) * c, a=(40, 90), b=(3, 39)),
    Problem("What is {abc} divided by {a}?", lambda a, b, c: b * c),
    Problem("{person} counts {a} tricycles and {b} bicycles in a yard in {town}. {c} of the bicycles are then taken "
            "away. "
            "How many wheels are left?", lambda a, b, c: 3 * a + 2 * (b - c), b=(8, 20), c=(2, 7)),
)  # fmt: skip

WORKING = (
    "", "", "", "Show your working.", "Think step by step.", "Give only the number.", "Explain each step to a child.",
    "Put the final answer on a line of its own.", "First write the equation, then solve it.",
    "Check your answer at the end.",
)  # fmt: skip

ITEMS_KO = (
    "사과",
    "구슬",
    "연필",
    "우표",
    "쿠키",
    "조개껍데기",
    "동전",
    "단추",
    "풍선",
    "공책",
    "귤",
    "딱지",
    "엽서",
    "머핀",
    "색종이",
    "스티커",
)
PROBLEMS_KO = (
    Problem("{person:은} {item:이} {b}개씩 든 상자를 {a}개 가지고 있고, 따로 {c}개를 더 가지고 있습니다. 모두 몇 "
            "개입니까?", lambda a, b, c: a * b + c),
    Problem("{item} {abc}개를 친구 {a}명에게 똑같이 나누어 주면 한 명이 몇 개를 받습니까?", lambda a, b, c: b * c),
    Problem("버스에 {a}명이 타고 있었습니다. {town}에서 {b}명이 내리고 {c}명이 탔습니다. 지금 몇 명이 타고 있습니까?",
            lambda a, b, c: a - b + c, a=(20, 60), b=(3, 18), c=(2, 25)),
    Problem("{person:은} 매일 책을 {a}쪽씩 {b}일 동안 읽고, 마지막 날에 {c}쪽을 더 읽었습니다. 모두 몇 쪽을 "
            "읽었습니까?",
            lambda a, b, c: a * b + c),
    Problem("{person:은} 한 시간에 {a}천 원을 받고 하루 {b}시간씩 {c}일 일했습니다. 모두 몇 천 원을 벌었습니까?",
            lambda a, b, c: a * b * c),
    Problem("{town}의 한 정원은 가로가 {a}미터, 세로가 {b}미터입니다. 둘레는 몇 미터입니까?",
            lambda a, b, c: 2 * (a + b)),
    Problem("{a} 곱하기 {b}에서 {c:을} 빼면 얼마입니까?", lambda a, b, c: a * b - c, a=(11, 40), b=(3, 19)),
    Problem("{person}의 나이는 {a}살이고 {other}의 나이는 그 두 배보다 {b}살 많습니다. {other:은} 몇 살입니까?",
            lambda a, b, c: 2 * a + b),
    Problem("물통에 물이 {abc}리터 있습니다. 1분에 {a}리터씩 빼면 몇 분 뒤에 비게 됩니까?", lambda a, b, c: b * c),
)  # fmt: skip
WORKING_KO = (
    "",
    "",
    "풀이 과정을 보여 주세요.",
    "답만 숫자로 쓰세요.",
    "단계별로 생각해 보세요.",
    "식을 먼저 쓰고 계산하세요.",
)
