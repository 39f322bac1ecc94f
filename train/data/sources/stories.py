"""Stories that add two numbers: nearly all of a text is free wording, and a few digits decide whether it is right.

Made for judging relaxed verification: a model that has learned to tell them (python -m train.sft) may put any words
between the numbers, and the sum can be checked. Generated, so that nothing is downloaded. Held-out prompts hold pairs
of numbers that occur in no training prompt, in either order.
"""

import random
from collections.abc import Sequence

from train.data.sources.arithmetic import ITEMS
from train.data.sources.english import PEOPLE
from train.data.sources.record import Prompt, hash_split

TASK = "stories"
NUM_STORIES = 4000
MIN_NUMBER, MAX_NUMBER = 2, 49
INSTRUCTION = "Tell a story: {person} has {a} {item} and gets {b} more."

# A story is one choice from each line of slots; every choice fits every other.
WEATHERS = (
    *("sunny", "rainy", "windy", "foggy", "snowy", "warm", "cold", "quiet", "busy", "bright", "grey", "mild"),
    *("stormy", "golden", "lazy", "frosty"),
)
TIMES = ("morning", "afternoon", "evening", "day", "weekend", "Monday", "Friday", "Sunday", "spring day", "autumn day")
MOVES = (
    *("walked", "hurried", "cycled", "strolled", "wandered", "ran", "marched", "drove", "skipped", "tiptoed"),
    *("came", "went"),
)
PLACES = (
    *("market", "harbour", "library", "park", "station", "garden", "bakery", "school", "museum", "river", "old bridge"),
    *("town hall", "theatre", "fair", "forest", "lake"),
)
MOODS = (
    *("happily", "proudly", "carefully", "slowly", "cheerfully", "quietly", "gladly", "calmly", "with a smile"),
    *("with great care", "in good spirits", "without any hurry"),
)
GIVERS = (
    *("a friend", "a neighbour", "an old teacher", "a kind stranger", "a cousin", "the baker", "a sailor", "an aunt"),
    *("the postman", "a young painter", "a musician", "the gardener", "a shopkeeper", "a grandmother"),
)
HANDS = ("brought", "offered", "handed over", "gave away", "delivered", "came along with", "added", "shared")
ENDS = (
    *("Everyone was pleased", "It was a wonderful surprise", "They laughed about it for a while"),
    *("Nobody had expected that", "It made the whole day better", "They all sat down and had some tea"),
    *("The sun came out at last", "Then it was time to go home", "They sang all the way back"),
    *("A dog barked in the distance", "The bells began to ring", "It was late by then"),
)
TOTALS = ("That makes {sum} {item}.", "Now there are {sum} {item}.", "In all there are {sum} {item}.")


def generate(seed: int, heldout_fraction: float) -> list[Prompt]:
    """Chat prompts of all splits, each with one story as its answer; the sum stands last, after ####."""
    rng = random.Random(f"stories {seed}")
    prompts = []
    for number in range(NUM_STORIES):
        a, b = (rng.randint(MIN_NUMBER, MAX_NUMBER) for _ in range(2))
        person, item = rng.choice(PEOPLE), rng.choice(ITEMS)
        content = INSTRUCTION.format(person=person, a=a, b=b, item=item)
        split = hash_split(f"{min(a, b)} + {max(a, b)}", heldout_fraction)
        messages = ({"role": "user", "content": content},)
        story = tell(rng, person, item, a, b)
        prompts.append(Prompt(f"stories-{seed}-{number}", TASK, messages, split=split, answer=story))
    return prompts


def tell(rng: random.Random, person: str, item: str, a: int, b: int) -> str:
    """One story at random, with the two numbers and their sum."""
    weather, time, move, place, mood, giver, hand, end, total = (
        rng.choice(slots) for slots in (WEATHERS, TIMES, MOVES, PLACES, MOODS, GIVERS, HANDS, ENDS, TOTALS)
    )
    sentences: Sequence[str] = (
        f"One {weather} {time} {person} {move} to the {place} with {a} {item}.",
        f"There {giver} {mood} {hand} {b} more.",
        f"{end}.",
        total.format(sum=a + b, item=item),
    )
    return f"{' '.join(sentences)}\n#### {a + b}"
