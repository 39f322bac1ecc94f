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
    "cupcakes", "paper cranes", "toy cars", "picture frames", "jars of honey",
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
