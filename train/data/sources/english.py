"""English word lists and instruction templates. Data only: `train.data.sources.instructions` combines them."""


def words(text: str) -> tuple[str, ...]:
    """Entries separated by semicolons or line ends."""
    return tuple(entry.strip() for line in text.splitlines() for entry in line.split(";") if entry.strip())


TOPICS = words("""
photosynthesis; ocean tides; plate tectonics; black holes; the water cycle; vaccines; antibiotics; earthquakes
volcanoes; solar eclipses; gravity; magnetism; lightning; rainbows; fermentation; evolution; the food chain
coral reefs; glaciers; comets; the immune system; sleep; memory; digestion; blood pressure; colour vision
echolocation; bird migration; beekeeping; pollination; composting; soil erosion; desert plants; rainforests
the ozone layer; acid rain; wind turbines; solar panels; hydroelectric dams; nuclear fusion; batteries
semiconductors; transistors; fibre optics; radio waves; touchscreens; barcode scanners; satellite navigation
jet engines; submarines; suspension bridges; elevators; refrigerators; microwave ovens; 3D printing
machine learning; search engines; encryption; computer viruses; cloud storage; databases; version control
unit testing; recursion; sorting algorithms; binary numbers; spreadsheets; operating systems; web cookies
two-factor authentication; spam filters; video compression; open-source software; virtual reality; self-driving cars
inflation; compound interest; mortgages; taxes; supply and demand; the stock market; insurance; pensions
minimum wages; international trade; small businesses; franchising; crowdfunding; advertising; customer loyalty
public libraries; juries; constitutions; elections; trade unions; the printing press; the Silk Road
the Roman aqueducts; the Industrial Revolution; ancient Egypt; the Vikings; medieval castles; the Renaissance
the Space Race; the Olympic Games; the postal service; lighthouses; canals; steam trains; the bicycle; the telephone
paper making; glass blowing; pottery; weaving; perfume; impressionist painting; photography; origami; calligraphy
opera; jazz; folk songs; drums; the violin; film editing; stage lighting; haiku; detective novels; fairy tales
autobiographies; public speaking; debating; chess; crossword puzzles; football; swimming; marathon running
rock climbing; yoga; tennis; fencing; archery; sailing; figure skating; judo; hiking; camping; birdwatching
gardening; houseplants; pruning fruit trees; baking bread; making cheese; brewing tea; roasting coffee; chocolate
olive oil; sushi; curry; pickling vegetables; barbecue; knife skills; food allergies; vitamins; first aid
stretching; meditation; stress; loneliness; good posture; eye strain; hearing loss; dental care; sunscreen
job interviews; time management; note-taking; mind maps; learning a language; exam nerves; studying abroad
volunteering; remote work; meetings; negotiation; apologising; small talk; parenting teenagers; adopting a dog
training a puppy; keeping goldfish; moving house; recycling; public transport; city parks; noise pollution
cycling to work; night trains; packing a suitcase; jet lag; travel budgets; hostels; maps; the metric system
probability; prime numbers; fractions; geometry; statistics; the golden ratio; logic puzzles; optical illusions
dreams; humour; curiosity; friendship; courage
""")

AUDIENCES = words("""
a ten-year-old; a university student; my grandmother; a busy manager; someone who has never heard of it; a teenager
a group of beginners; a sceptical friend; a new employee; a tourist; a primary school class; a curious neighbour
""")

# Appended to an instruction: these make the answers short, middling or long.
LENGTHS = (
    words("""
Answer in one sentence.; Keep it under fifty words.; Use two short paragraphs.; Give as much detail as you can.
Use bullet points.; Be brief.; Include an example.; Write about two hundred words.; Use simple words.
Start with the most important point.; Finish with a one-line summary.; Explain every step.
""")
    + ("",) * 10
)

EXPLAIN = words("""
Explain {topic} to {audience}. {length}
What should {audience} know about {topic}? {length}
Give me a short introduction to {topic}. {length}
Why is it worth knowing about {topic}? {length}
Tell me something surprising about {topic}. {length}
Write an encyclopedia entry about {topic}. {length}
I keep hearing about {topic}. Can you tell me what the main ideas are? {length}
What are common misunderstandings about {topic}, and what is actually true? {length}
Which is harder to explain to {audience}: {topic} or {topic2}? Say why. {length}
Describe {topic} using an analogy from the kitchen. {length}
Can you give me the key facts on {topic}? {length}
How would you teach {topic} to {audience}? {length}
What is the history behind {topic}? {length}
Write the opening paragraph of an article on {topic}. {length}
If you could say only one thing about {topic}, what would it be? {length}
What questions about {topic} are still worth asking? {length}
Discuss the advantages and disadvantages of {topic}. {length}
Compare {topic} with {topic2}. What do they have in common? {length}
How have ideas about {topic} changed over the last hundred years? {length}
Define the most important terms connected with {topic}. {length}
""")

LIST = words("""
List {count} facts about {topic}.
Give me {count} questions a teacher could ask about {topic}.
What are {count} things people often get wrong about {topic}?
Suggest {count} titles for a talk on {topic}.
Name {count} words that are connected with {topic} and say what each one means.
Write a numbered list of {count} tips for someone interested in {topic}.
Make a checklist with {count} items for a school project about {topic}.
Come up with {count} ideas for a blog about {topic}, one line each.
Make a table with {count} rows on {topic}: term, meaning, example.
Give {count} reasons why {topic} could interest {audience}.
Write {count} quiz questions on {topic} with their answers.
I need {count} discussion points about {topic} for a meeting. Bullet points, please.
Plan a week of learning about {topic}, one activity a day.
Outline an essay on {topic} with {count} sections.
List the pros and cons of {topic}.
""")
COUNTS = ("three", "four", "five", "six", "seven", "ten", "3", "5", "8")

CREATIVE = words("""
Write a short story about {person}, who lives in {town} and is fascinated by {topic}.
Write a poem about {topic} in {count} lines.
{person} from {town} wants to know more about {topic}. Write a friendly letter back.
Write a diary entry by {person} after a day spent on {topic}.
Write a dialogue between {person} and {other} about {topic}.
Write a phone call in which {person} asks {other} for advice about {topic}.
Two colleagues, {person} and {other}, disagree about {topic}. Write their conversation.
Write a radio advertisement for a course on {topic} in {town}.
Write a speech that {person} could give at a school in {town} about {topic}.
Write a joke about {topic} and explain why it is funny.
Write a news report: the mayor of {town} has announced a festival of {topic}.
Interview {person}, an expert on {topic}. Give {count} questions and answers.
Write the first scene of a play set in {town} that involves {topic}.
Write a product review by {person} of a beginner's book on {topic}.
""")

# Each is a conversation: user, assistant, user.
FOLLOW_UPS: tuple[tuple[str, ...], ...] = (
    (
        "Hi! I'd like to talk about {topic}.",
        "Of course. What would you like to know?",
        "Where should I start? {length}",
    ),
    (
        "I have a presentation on {topic} tomorrow.",
        "How long is it, and who is listening?",
        "Five minutes, for {audience}. Please write it for me.",
    ),
    ("Do you know anything about {topic}?", "Yes, quite a lot.", "Then tell me the most useful thing. {length}"),
    ("Give me a hobby I could try.", "How about {topic}?", "Why that? Convince me. {length}"),
    (
        "My friend {person} never stops talking about {topic}.",
        "It sounds as if you would like to join in.",
        "Yes. Teach me enough to ask {person} three good questions.",
    ),
    (
        "Let's play a game about {topic}.",
        "Great, what are the rules?",
        "You ask me {count} questions, from easy to hard. Start by listing them all.",
    ),
    (
        "I'm moving to {town} and know nobody there.",
        "That can be hard. What do you enjoy?",
        "Mostly {topic}. How could I meet people through that? {length}",
    ),
    (
        "I read an article about {topic}.",
        "What did it say?",
        "I forgot most of it. What does such an article usually say? {length}",
    ),
    (
        "Can you help me plan a lesson?",
        "Gladly. What is the subject and how old are the pupils?",
        "The subject is {topic}; they are eleven. We have {count} lessons.",
    ),
    ("Is it boring to learn about {topic}?", "Not at all.", "Prove it. {length}"),
)

PEOPLE = words("""
Mina; Oskar; Priya; Tomas; Leila; Henrik; Aiko; Bruno; Carla; Dmitri; Elif; Farid; Greta; Hugo; Ines; Jonah; Kavya
Lorenz; Maren; Nadia; Otis; Paloma; Quentin; Rosa; Samir; Tilda; Ursula; Viktor; Wanda; Xavier; Yusuf; Zelda; Anders
Beatrix; Cosmo; Delia; Emeka; Fiona; Gideon; Hana; Ivo; Jasmin; Kofi; Linnea; Mateus; Noor; Orla; Pavel; Rune
Sunita
""")
TOWNS = words("""
Brackwater; Old Fenwick; Marlstone; Port Ellery; Sandgrove; Tolverton; Upper Quill; Westerby; Ashcombe Vale
Dunmarrow; Eastholm; Farrowdale; Glenmoor; Harrow Bay; Inverlast; Kestrelford; Langmere; Millhaven; Northwick Green
Orrinstead; Pinecross; Redhollow; Silverbeck; Thornquay; Wexcombe; Yarrowby; Zennor Hill; Coldspring; Birchley
Larkfield; Saltmarsh End; Stonebridge Mills; Cobbleton; Havering Point; Lower Tarn; Mossgate; Oakenshaw; Quarry Bank
Rivermouth; Tidewell
""")

CODE_TASKS = words("""
reverses the words of a sentence; checks whether a string is a palindrome; finds the second largest number in a list
removes duplicates from a list and keeps the order; counts how often each word occurs in a text
merges two sorted lists; converts Roman numerals to integers; checks whether brackets are balanced
computes the greatest common divisor; returns the first n Fibonacci numbers; finds all primes below n with a sieve
rotates a matrix by ninety degrees; flattens a nested list; groups words that are anagrams
validates an email address; parses a line of CSV with quotes
formats a number of seconds as hours, minutes and seconds; converts a temperature between Celsius and Fahrenheit
computes the moving average of a series; finds the longest common prefix of some strings
checks a credit card number; draws a triangle of stars; shuffles a deck of cards; finds the shortest path in a grid
sorts people by age and then by name; computes a factorial without recursion; counts the vowels in a string
finds the missing number in a range; adds two fractions; searches a sorted list by bisection
encodes text with a Caesar cipher; compresses a string by run lengths; transposes a table; computes the median
picks a random weighted item; splits a list into chunks; finds the intersection of two lists
reads a file and returns its longest line; renames all files in a folder to lower case
retries a call with growing pauses; caches the results of a slow call; limits how often something may be called
checks whether a year is a leap year; returns the day of the week of a date
computes the number of days between two dates; computes monthly loan payments
converts a colour from hexadecimal to RGB; simulates rolling two dice; plays one round of rock, paper, scissors
checks a Sudoku row; finds the longest word in a sentence; capitalises every word of a title
deep-copies a dictionary; inverts a dictionary; merges two dictionaries and adds their values
counts the lines of code in a folder; makes a slug from a title; finds pairs that sum to a target
computes the power set; generates all permutations; multiplies two matrices; counts the set bits of an integer
converts a number to binary; checks whether two strings are one edit apart; trims a text to a width
counts the islands in a map; evaluates a postfix expression; detects a cycle in a linked list
reverses a linked list; computes the depth of a binary tree; lists a tree level by level
computes the edit distance of two words; sums the digits of a number; estimates pi by random points
draws a histogram as text; finds the busiest hour in a log; extracts all links from a page; hashes a password safely
generates a strong password; checks the strength of a password; truncates a text at a word boundary
""")
CODE_LANGUAGES = ("Python",) * 6 + ("JavaScript", "TypeScript", "C", "Go", "Rust", "Java", "Bash")
CODE_THINGS = words("""
a bank account; a shopping cart; a library catalogue; a parking garage; a vending machine; a to-do list; a chat room
a priority queue; a least-recently-used cache; a trie; a bounded stack; a ring buffer; a playlist; a recipe book
a traffic light; an alarm clock; an address book; a lift controller; a voting machine; a tic-tac-toe board
a thermostat; a stopwatch; a text adventure; a ticket office; a bus timetable; a job scheduler; an event log
a unit converter; a student register; a hotel booking; a graph of cities; a bag of coins; a deck of flashcards
a score board; a file index; a rate limiter
""")
CODE_FUNCTION = words("""
Write a {language} function that {task}.
Write a {language} function that {task}, with comments that explain each step.
Please write {language} code that {task}. Include an example of how to call it.
How would you write a function in {language} that {task}? Show the code and then explain it briefly.
I need a small {language} program that {task}. Only code, no explanation.
Write a function that {task} in {language}, and three tests for it.
Give two different {language} versions of a function that {task} and compare them.
Explain, without code, how a program {task}.
What edge cases matter for a function that {task}? List them, then write it in {language}.
Write the docstring and signature of a {language} function that {task}.
My {language} function that {task} is slow. How could it be made faster? Show an example.
Write pseudo-code for a program that {task}, then translate it into {language}.
""")
CODE_CLASS = words("""
Write a {language} class for {thing}.
Design {thing} in {language}: first the methods, then the code.
Write a minimal {language} implementation of {thing}, and show it in use.
Which data structures would you use for {thing}? Explain and give a short {language} sketch.
Write unit tests for {thing} in {language}.
Sketch a database schema in SQL for {thing}, and {count} example queries.
Review the design of {thing} in {language}: what usually goes wrong, and how is it avoided?
Write a command-line program in {language} that models {thing}.
""")
