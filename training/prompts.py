"""Self-made prompts: templates over word lists, each prompt a function of a random generator.

Six kinds: explanations, code, arithmetic word problems, rewriting, lists and stories. None uses the
wrapper sentences of the evaluation sets, so that scores there measure more than their memory.
"""

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    """Split a comma-separated list that runs over several lines."""
    return tuple(" ".join(text.split()).split(", "))


NAMES = _words(
    """
    Ana, Ben, Chloe, Daniel, Elena, Felix, Grace, Hugo, Ines, Jonas, Keiko, Liam, Mara, Noah,
    Olga, Pedro, Quinn, Rosa, Samir, Tara, Umar, Vera, Walter, Ximena, Yusuf, Zoe, Amir, Bianca,
    Carlos, Dana, Emil, Fatima
    """
)
THINGS = _words(
    """
    apples, books, pencils, stickers, marbles, tickets, cookies, shells, stamps, bottles, candles,
    coins, flowers, eggs, cards, boxes, oranges, balloons, notebooks, cups, bricks, plants,
    ribbons, toys
    """
)
PLACES = _words(
    """
    market, library, school, garden, bakery, harbour, museum, farm, station, theatre, workshop,
    park, bookshop, kitchen, beach, office, hospital, forest, village square, sports hall
    """
)
TOPICS = _words(
    """
    photosynthesis, gravity, inflation, the water cycle, how vaccines work, plate tectonics, black
    holes, the French Revolution, the immune system, electric motors, supply and demand,
    evolution, machine learning, the greenhouse effect, how airplanes fly, encryption, the Roman
    Empire, DNA, how batteries work, the stock market, tides, earthquakes, rainbows, nuclear
    energy, the printing press, the human heart, compound interest, how the internet works,
    volcanoes, sleep, the Silk Road, operating systems, probability, the periodic table, solar
    panels, how memory works, democracy, antibiotics, the Renaissance, sound waves, fermentation,
    glaciers, neural networks, satellites
    """
)
AUDIENCES = _words(
    """
    a ten-year-old, a high school student, a beginner, my grandmother, a curious friend, someone
    in a hurry, a new colleague, a college student
    """
)
# Python four times: most code that is asked for is Python.
LANGUAGES = ("Python",) * 4 + ("JavaScript", "Java", "C", "SQL", "Bash")
TASKS = _words(
    """
    reverses a string, counts the vowels in a string, checks whether a number is prime, returns
    the largest element of a list, removes duplicates from a list while keeping the order,
    computes the factorial of a number, merges two sorted lists, checks whether a word is a
    palindrome, counts how often each word occurs in a text, converts Celsius to Fahrenheit, finds
    the second smallest number in a list, sums the digits of an integer, flattens a nested list,
    finds the common elements of two lists, generates the first n Fibonacci numbers, sorts a list
    of dictionaries by a key, validates an email address, rotates a list by k places, computes the
    greatest common divisor of two numbers, groups words by their first letter, finds the longest
    word in a sentence, capitalizes every word of a sentence, checks whether two strings are
    anagrams, computes the moving average of a list, converts an integer to binary, parses a line
    of comma separated values, implements a stack with push and pop, performs a binary search,
    transposes a matrix, computes the median of a list, replaces every space by an underscore,
    splits a list into chunks of size n, inverts a dictionary, reads a file and counts its lines
    """
)
FUNCTIONS = {
    "clamp(value: float, low: float, high: float) -> float": "Limit value to low..high.",
    "running_total(numbers: list[int]) -> list[int]": "Return the cumulative sums of the numbers.",
    "initials(full_name: str) -> str": "Return the initials of a name, in capitals.",
    "is_leap_year(year: int) -> bool": "Tell whether the year is a leap year.",
    "every_other(items: list) -> list": "Return every second item, starting with the first.",
    "caesar(text: str, shift: int) -> str": "Shift every letter of the text by the given amount.",
    "count_inversions(numbers: list[int]) -> int": "Count pairs that are in the wrong order.",
    "compress(text: str) -> str": "Replace runs of a letter by the letter and its count.",
    "interleave(a: list, b: list) -> list": "Alternate the items of a and b.",
    "missing_number(numbers: list[int]) -> int": "Find the one number missing from 0..n.",
    "title_case(text: str) -> str": "Capitalize the first letter of every word.",
    "dot(a: list[float], b: list[float]) -> float": "Return the dot product of two vectors.",
    "most_common(words: list[str]) -> str": "Return the word that occurs most often.",
    "distance(p: tuple, q: tuple) -> float": "Return the distance between two points.",
    "balanced(text: str) -> bool": "Tell whether all brackets in the text are closed in order.",
    "pairs_with_sum(numbers: list[int], total: int) -> list": "Find pairs that add up to total.",
}
SENTENCES = (
    "The meeting was very long and nobody knew what it was about.",
    "I can't come to work today because my car is broken.",
    "The new phone is good but it costs too much money for most people.",
    "We was going to the store when it start to rain.",
    "Our company makes shoes and we want that people buy them.",
    "She said that the project is late because of the missing parts.",
    "The river rises every spring and the farmers have to move their animals.",
    "Please send me the report as fast as you can.",
    "The soup was cold, the bread was hard and the waiter was rude.",
    "Learning a language takes time, but a little practice every day helps.",
    "The old lighthouse has guided ships for two hundred years.",
    "He don't like the plan but he will help anyway.",
    "Many cities build more bicycle lanes to reduce traffic.",
    "The museum opens at nine and closes at five except on Mondays.",
)
STYLES = _words(
    """
    more formal, shorter, friendlier, more exciting, in simple words, in the past tense, as a
    question, as a headline, more polite, without any grammar mistakes, as a short poem, in the
    passive voice
    """
)
LISTABLE = _words(
    """
    healthy breakfasts, ways to save money, tips for a job interview, famous inventors, uses of
    baking soda, countries in South America, exercises without equipment, ways to learn a
    language, mammals that live in the sea, things to pack for a camping trip, board games for
    families, ways to reduce stress, renewable energy sources, birthday gift ideas, musical
    instruments, causes of the First World War, good study habits, vegetables that grow in winter,
    questions to ask a landlord, steps to bake bread, features of a good website
    """
)
HEROES = _words(
    """
    a lonely robot, a brave mouse, a young painter, an old sailor, a talking tree, twin sisters, a
    retired detective, a lost astronaut, a shy dragon, a clockmaker, a street musician, a
    beekeeper
    """
)
PLOTS = _words(
    """
    finds a hidden door, learns to trust a stranger, must cross the desert, loses a precious map,
    discovers an old letter, saves the village from a flood, wants to see the sea, keeps a secret,
    builds a flying machine, returns home after many years, makes an unlikely friend
    """
)


def _pick(rng: np.random.Generator, options: "list[str] | tuple[str, ...]") -> str:
    return options[int(rng.integers(len(options)))]


def explanation(rng: np.random.Generator) -> str:
    """Ask for an explanation."""
    topic = _pick(rng, TOPICS)
    form = _pick(
        rng,
        (
            "Explain {t} to {a}.",
            "What is the main idea behind {t}?",
            "Can you describe {t} in a few sentences?",
            "Why does {t} matter? Give an example.",
            "What are common misunderstandings about {t}?",
            "Summarize the most important facts about {t}.",
            "Compare {t} with {u}.",
            "How would you teach {t} to {a}?",
        ),
    )
    return form.format(t=topic, a=_pick(rng, AUDIENCES), u=_pick(rng, TOPICS))


def code(rng: np.random.Generator) -> str:
    """Ask for a small program, or for the body of a function."""
    if rng.random() < 0.4:
        signature = _pick(rng, list(FUNCTIONS))
        stub = f'```python\ndef {signature}:\n    """{FUNCTIONS[signature]}"""\n```'
        form = _pick(
            rng,
            (
                "Complete this function.\n{s}",
                "Fill in the body:\n{s}",
                "{s}\nPlease write the implementation.",
                "Here is a stub. Implement it and explain briefly how it works.\n{s}",
            ),
        )
        return form.format(s=stub)
    form = _pick(
        rng,
        (
            "Write a {l} function that {t}.",
            "How do I write {l} code that {t}?",
            "Show me a {l} program that {t}, with comments.",
            "I need a {l} function that {t}. Include an example call.",
            "Give me the shortest {l} code that {t}.",
        ),
    )
    return form.format(l=_pick(rng, LANGUAGES), t=_pick(rng, TASKS))


def arithmetic(rng: np.random.Generator) -> str:
    """Ask a word problem of one to three steps."""
    a, b, c = (int(rng.integers(low, high)) for low, high in ((12, 90), (2, 12), (2, 30)))
    form = _pick(
        rng,
        (
            "{n} has {a} {t}. {m} gives {n} {c} more, and then {n} loses {b}. How many are left?",
            "A box holds {b} {t}. How many {t} are in {a} boxes, if {c} of them are broken?",
            "{n} buys {b} {t} for ${c} each and pays with ${a}00. How much change does {n} get?",
            "At the {p}, {n} sells {a} {t} on Monday and {b} times as many on Tuesday. How many "
            "{t} is that in total?",
            "{n} reads {c} pages a day. How many pages does {n} read in {b} weeks?",
            "A train travels {a} miles an hour for {b} hours then {c} miles more. How far is it?",
            "{n} earns ${c} an hour and works {b} hours a day for 5 days. How much does {n} earn?",
            "{n} shares {a} {t} equally among {b} friends. How many does each get, and how many "
            "remain?",
            "A shirt costs ${a} and is reduced by {b}0 percent. What is the new price?",
            "{n} is {b} years older than {m}. {m} is {c} years old. How old are they together?",
            "The {p} is {c} meters wide and {a} meters long. What are its area and perimeter?",
        ),
    )
    problem = form.format(
        n=_pick(rng, NAMES), m=_pick(rng, NAMES), t=_pick(rng, THINGS), p=_pick(rng, PLACES),
        a=a, b=b, c=c,
    )  # fmt: skip
    ending = _pick(rng, ("", "", " Show your work.", " Explain each step.", " Think step by step."))
    return problem + ending


def rewriting(rng: np.random.Generator) -> str:
    """Ask to change a sentence."""
    form = _pick(
        rng,
        (
            'Rewrite this sentence so that it is {s}: "{x}"',
            'Make the following text {s}.\n\n"{x}"',
            "{x}\n\nRewrite the text above: {s}.",
        ),
    )
    return form.format(s=_pick(rng, STYLES), x=_pick(rng, SENTENCES))


def listing(rng: np.random.Generator) -> str:
    """Ask for a list."""
    form = _pick(
        rng,
        (
            "List {n} {x}.",
            "Give me {n} {x}, with one sentence about each.",
            "What are some {x}?",
            "I am looking for {x}. Can you suggest {n}?",
        ),
    )
    return form.format(n=int(rng.integers(3, 11)), x=_pick(rng, LISTABLE))


def story(rng: np.random.Generator) -> str:
    """Ask for a story or another short text."""
    form = _pick(
        rng,
        (
            "Write a short story about {h} who {p}.",
            "Write the first paragraph of a novel in which {h} {p}.",
            "Tell me a bedtime story: {h} {p}.",
            "Write a dialogue between {h} and {g}.",
            "Write a short email in which {n} invites {m} to the {l}.",
            "Write a blog post of about 150 words on {t}.",
        ),
    )
    return form.format(
        h=_pick(rng, HEROES), g=_pick(rng, HEROES), p=_pick(rng, PLOTS), n=_pick(rng, NAMES),
        m=_pick(rng, NAMES), l=_pick(rng, PLACES), t=_pick(rng, TOPICS),
    )  # fmt: skip


# Shares of the prompts that come from templates; the rest of the data is invented by the model.
KINDS = (
    (0.33, arithmetic),
    (0.31, code),
    (0.15, explanation),
    (0.07, rewriting),
    (0.07, listing),
    (0.07, story),
)


def template_prompt(rng: np.random.Generator) -> str:
    """One user message from the templates."""
    shares = np.cumsum([share for share, _ in KINDS])
    return KINDS[int(np.searchsorted(shares, rng.random() * shares[-1]))][1](rng)
