"""Short English passages to summarise or rewrite, composed from sentence patterns. Data and one pure function.

A genre is a sequence of places; each place offers sentence patterns of which one is used, and "" leaves the place out.
"""

import random

from train.data.sources.english import words

Genre = tuple[tuple[str, ...], ...]

PROJECTS = words("""
a covered market; a footbridge; a skate park; a community garden; a night bus; an open-air cinema; a repair workshop
a reading room; a tram line; a bird sanctuary; a music school; a swimming lake; a wind farm; a youth theatre
a cookery club; a bicycle garage; a planetarium; a pottery studio; a flood wall; a public oven; a climbing hall
a weather station; a seed library; a toy museum
""")
PRODUCTS = words("""
a folding kettle; a solar lantern; a paper notebook; a rain jacket; a standing desk; a wooden puzzle; a hand blender
a travel pillow; a garden hose; a desk lamp; a water filter; a pocket radio; a yoga mat; an electric scooter
a bread maker; a camping stove; a phone holder; a bicycle bell; a wall clock; a pair of headphones; a kitchen scale
a cast-iron pan; a bird feeder; a board game
""")
ANIMALS = words("""
otters; barn owls; hedgehogs; red foxes; storks; harbour seals; tree frogs; wild ponies; hares; badgers; kingfishers
bats; beavers; mute swans; lynxes; cranes; dormice; newts; stag beetles; goshawks; voles; herons; woodpeckers
grass snakes
""")
NUMBERS = ("twelve", "twenty", "forty", "sixty", "ninety", "two hundred", "three hundred and fifty", "six hundred")
MONTHS = ("January", "March", "April", "June", "August", "September", "October", "November")

GENRES: tuple[Genre, ...] = (
    (  # town news
        ("The council of {town} voted on Tuesday to build {project}.",
         "After a long debate, {town} will get {project} after all."),
        ("The plan was first put forward by {person}, a retired teacher, {number} months ago.",
         "It was {person} who collected {number} signatures in favour of it."),
        ("Supporters say that it will bring life back to the old centre.",
         "Shop owners hope for more visitors on quiet days.", ""),
        ("{other}, who lives next to the site, fears noise and traffic.",
         "Not everyone is pleased: {other} called it a waste of money.",
         "{other} asked why the school roof had to wait."),
        ("The mayor answered that half of the cost is paid by the region.",
         "The cost is put at {number} thousand coins.", ""),
        ("Work is to begin in {month} and should take a year.", "If the weather allows, it will open in {month}."),
    ),
    (  # wildlife report
        ("For the first time in decades, {animal} have been seen near {town}.",
         "The number of {animal} around {town} has doubled."),
        ("Volunteers counted {number} of them in a single week of {month}.",
         "{person} has watched them every evening since {month}."),
        ("Cleaner water and fewer pesticides are thought to be the reason.",
         "Nobody is quite sure what brought them back.",
         "A warm spring may have helped, says {person}."),
        ("Farmers have been asked to leave a strip of each field unmown.",
         "Walkers should keep their dogs on a lead until autumn."),
        ('"They need quiet more than they need food," {other} explained.', "",
         "{other} is writing a small guide for schools."),
        ("A second count is planned for next year.", "Any sighting can be reported at the library."),
    ),
    (  # product launch
        ("A workshop in {town} has begun to sell {product} that is made without any plastic.",
         "{person}, an engineer from {town}, spent four years designing {product}."),
        ("The idea came during a holiday on which everything went wrong.",
         "It started as a present for {other}, who hates clutter."),
        ("The first {number} pieces were gone within a day.",
         "So far {number} have been sold, mostly to people nearby."),
        ("Every part can be replaced with an ordinary screwdriver.",
         "It weighs less than an apple and comes with a ten-year promise."),
        ("Some buyers complained about the price and the long wait.",
         "{other} thinks that it is still too hard to clean.", ""),
        ("A cheaper version is to follow in {month}.",
         "A large company offered to buy the design, but {person} refused."),
    ),
    (  # life story
        ("{person} was born in {town} as the youngest of five children.", "{person} grew up above a bakery in {town}."),
        ("At fourteen, {person} left school to work in a printing shop.",
         "Teachers found the child dreamy and often late."),
        ("A chance meeting with {other}, who owned {number} books on the stars, changed everything.",
         "One winter {other} lent the family a telescope, and nobody ever asked for it back."),
        ("For {number} nights in a row the two of them drew what they saw.",
         "There followed years of study by candlelight.", ""),
        ("The drawings were published in {month} and admired far beyond the region.",
         "Success came late and was hardly noticed at home."),
        ("Today {project} in the town bears the name of {person}.", "A small statue now stands beside the station."),
    ),
    (  # study
        ("Researchers in {town} asked {number} adults to give up their phones for one week in {month}.",
         "What happens if people walk to work? A study with {number} people in {town} tried to find out."),
        ("Half of them also kept a diary about their mood.", "All of them wore a small sensor at night."),
        ("Most slept longer, and a third said that they felt calmer.",
         "On average they slept half an hour more than before."),
        ("The effect was gone a month later.", "Those over sixty noticed hardly any change.", ""),
        ("{person}, who led the study, warns that the group was small.",
         "The result may not hold elsewhere, {person} admits."),
        ("{other}, who was not involved, would like to see it repeated with shift workers.",
         "A larger study is being prepared."),
    ),
    (  # accident and rescue
        ("A delivery van slid into the canal at {town} early on Friday.",
         "Heavy rain flooded the underpass of {town} on Sunday night."),
        ("{person}, who was walking a dog, heard shouting and ran to the bank.",
         "{person} was on the way home from a late shift."),
        ("Together with {other}, a passing cyclist, a rope was tied to a lamp post.",
         "With a ladder from a building site, {other} reached the driver."),
        ("The driver was cold but unhurt.", "{number} parcels were lost in the water.", "Nobody was injured."),
        ("The road stayed closed until noon.", "Police are asking for witnesses.", ""),
        ("Residents have asked for a barrier at this place since {month}.",
         "The town now wants to put up warning lights."),
    ),
    (  # travel piece
        ("You do not arrive in {town} by accident: the last train leaves at six.",
         "Few guides mention {town}, and locals like it so."),
        ("The best time to come is {month}, when the lanes smell of woodsmoke.",
         "In {month} the whole place smells of plums."),
        ("Stay at the inn of {person}, which has {number} clocks and no two that agree.",
         "{person} rents out two rooms above the old ferry office."),
        ("In the morning, walk up to the ruins and look for {animal}.",
         "From the bridge one can often see {animal} at dusk."),
        ("Lunch is soup, always soup, and it is never the same.", "Bring cash, since no café takes cards.", ""),
        ("{other}, a guide, tells ghost stories for a small coin.",
         "Leave before the bells start, or stay for good, as {other} did."),
    ),
    (  # work memo
        ("Our team in {town} will move to a new office in {month}.",
         "From {month} on, the branch in {town} changes its opening hours."),
        ("{person} is in charge of the plan and will answer questions.",
         "Please send all questions to {person} before the weekend."),
        ("Every desk gets a label; please pack only what belongs to you.",
         "There will be {number} desks, which are not assigned."),
        ("The kitchen will be shared with the design group of {other}.",
         "{other} has kindly offered to lend us a meeting room."),
        ("On the last Friday nobody needs to come in.", "The phones will be off for one afternoon.", ""),
        ("There will be cake.", "Thank you all for your patience; it will be worth it.",
         "A second message with a map will follow."),
    ),
    (  # club minutes
        ("The gardening club of {town} met on Thursday with {number} members present.",
         "At its yearly meeting, the choir of {town} elected {person} as its new head."),
        ("The treasurer reported a small surplus.", "The accounts were approved without a vote against."),
        ("{person} proposed {project} as a joint project with the school.",
         "A trip to see {animal} was suggested by {person}."),
        ("{other} objected that the last project had never been finished.",
         "{other} offered to look into the cost by {month}."),
        ("The matter was put off until the next meeting.", "It was agreed to ask the members by letter.", ""),
        ("The evening ended with a raffle, in which {product} was won.", "The meeting closed at ten."),
    ),
    (  # complaint letter
        ("I am writing about {product}, which I ordered from your shop in {town} in {month}.",
         "Three weeks ago I bought {product} from your branch in {town}."),
        ("It arrived two weeks late and in a torn box.", "On the second day a part of it simply fell off."),
        ("I called {number} times and reached nobody.",
         "Your colleague {person} promised a new one but never called back."),
        ("My neighbour {other} has the same model and has no trouble with it.",
         "It was meant as a present for {other}."),
        ("I would like my money back or a working one.", "Please tell me what you intend to do about this."),
        ("I have been a customer for many years and was always content.", "I hope for a quick answer.", ""),
    ),
    (  # science notice
        ("A stone that {person} found on a beach near {town} turned out to be a meteorite.",
         "Divers near {town} have come upon a wreck that appears on no map."),
        ("It is about as old as the Earth itself, tests in {month} have shown.",
         "Its timber was dated to a cold winter long ago."),
        ("Only {number} finds of this kind are known.", "Objects like it are found perhaps once in a generation."),
        ("At first nobody believed the story.", 'The museum had kept it in a drawer with the label "unclear".', ""),
        ("{other}, a geologist, calls it a lucky day for the whole field.", '"I nearly threw it away," said {other}.'),
        ("It will be on show for a year, close to {project}.", "The exact place is being kept secret."),
    ),
    (  # sports report
        ("{town} won the regional cup on Saturday, against all predictions.",
         "It was the strangest final that {town} has ever seen."),
        ("After ten minutes the visitors led by two goals.", "Rain had turned the pitch into a pond."),
        ("Then {person} came on, seventeen years old and in borrowed boots.",
         "The captain, {person}, played on with a bandaged hand."),
        ("{number} supporters sang until they lost their voices.",
         "A flock of birds stopped play for a quarter of an hour.", ""),
        ("The winning goal fell in the last minute, off the knee of {other}.", "{other} saved two penalties in a row."),
        ("The team returns to training in {month}.", "The cup now stands in the window of the bakery."),
    ),
)  # fmt: skip

SUMMARISE = words("""
Summarise the following text in one sentence.
Summarise this in two or three sentences:
Give the main points of the text below as bullet points.
What is this text about? Answer in at most twenty words.
Write a headline for this text and a one-sentence summary.
Please give me a short summary of the following passage.
Who did what, where and when? Summarise the passage below.
Summarise the text for someone who has only ten seconds.
What should I take away from this? One or two sentences, please.
Read the passage and write a summary of about fifty words.
List the people and places in this text and what is said about each.
Explain in your own words what happens here:
""")
REWRITE = words("""
Rewrite the following text in simpler words.
Rewrite this as a formal report:
Rewrite the passage below as a letter to a friend.
Make this text half as long and keep the facts.
Rewrite the text so that it sounds enthusiastic.
Turn the following into a poem.
Rewrite this in the future tense:
Change the text below into a conversation between two people.
Improve the style of this text without changing what it says.
Rewrite this for children of eight.
Rewrite the text from the point of view of one of the people in it.
Turn this into a list of numbered statements:
Rewrite the text in the first person.
Make the following passage longer by adding details.
""")


def compose(genre: Genre, slots: dict[str, str], rng: random.Random, max_sentences: int | None = None) -> str:
    """One passage: a pattern for each place of the genre, with the same people and places throughout; errors: a slot "
    "without value."""
    sentences = [rng.choice(place).format(**slots) for place in genre]
    return " ".join([sentence for sentence in sentences if sentence][:max_sentences])
