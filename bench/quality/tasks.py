"""Generated tasks for the skills of the tiny hybrid, each with the one answer that counts as right.

Prompts follow the model's README; names, numbers and words are drawn anew from a seed, so what is asked was not seen in
training but by chance. Skills with a fixed set of questions (capitals) ask each at most once.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from longlane.text.template import Message

WORDS = [
    *("red", "blue", "green", "grey", "fox", "dog", "cat", "bird", "house", "tree", "river", "lake", "road", "hill"),
    *("seven", "nine", "old", "new", "big", "tall", "cold", "warm", "apple", "bread", "stone", "glass", "paper"),
]
# The model spells a word in capitals only if it met those capitals in training.
CAPITALISED = [
    *("red", "blue", "green", "grey", "white", "brown", "golden", "fox", "dog", "camel", "apple", "lemon", "basket"),
    *("stone", "boat"),
]
NAMES = ["Anna", "Mike", "Sara", "Tom", "Lucy", "Peter", "Emma", "David", "Nina", "Oscar", "Julia", "Max"]
CITIES = ["Paris", "Berlin", "Oslo", "Rome", "Madrid", "London", "Tokyo", "Vienna", "Lisbon", "Prague", "Dublin"]
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Poland": "Warsaw",
}
GREEK = ["alpha", "beta", "gamma", "delta", "sigma", "omega"]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Task:
    """`expected` is the whole answer after the thinking block, if there is one."""

    skill: str
    messages: list[Message]
    expected: str
    thinking: bool = False
    tools: list[dict[str, Any]] | None = field(default=None)

    def right(self, answer: str) -> bool:
        said = answer.rpartition("</think>")[2] if self.thinking else answer
        return said.strip() == self.expected


Make = Callable[[random.Random], tuple[list[Message], str]]


def turns(*texts: str) -> list[Message]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def fact(rng: random.Random) -> tuple[str, str]:
    """A key such as alpha-17 and its four-digit code."""
    return f"{rng.choice(GREEK)}-{rng.randrange(10, 100)}", str(rng.randrange(1000, 10000))


def copy_numbers(rng: random.Random) -> tuple[list[Message], str]:
    text = " ".join(str(rng.randrange(10, 100)) for _ in range(rng.randrange(4, 12)))
    return turns(f"Repeat exactly: {text}"), text


def copy_words(rng: random.Random) -> tuple[list[Message], str]:
    text = " ".join(rng.choices(WORDS, k=rng.randrange(4, 12)))
    return turns(f"Repeat exactly: {text}"), text


def reverse(rng: random.Random) -> tuple[list[Message], str]:
    items = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randrange(3, 8))
    return turns(f"Reverse this list: {', '.join(items)}"), ", ".join(reversed(items))


def upper(rng: random.Random) -> tuple[list[Message], str]:
    text = " ".join(rng.choices(CAPITALISED, k=rng.randrange(2, 5)))
    return turns(f"Write in upper case: {text}"), text.upper()


def count(rng: random.Random) -> tuple[list[Message], str]:
    first = rng.randrange(1, 30)
    last = first + rng.randrange(8, 25)
    return turns(f"Count from {first} to {last}."), ", ".join(map(str, range(first, last + 1)))


def chinese_count(rng: random.Random) -> tuple[list[Message], str]:
    last = rng.randrange(8, 31)
    return turns(f"请从1数到{last}。"), "，".join(map(str, range(1, last + 1)))


def key_value(rng: random.Random) -> tuple[list[Message], str]:
    facts = dict(fact(rng) for _ in range(4))
    key = rng.choice(sorted(facts))
    text = " ".join(f"The code of {name} is {code}." for name, code in facts.items())
    return turns(f"{text} What is the code of {key}?"), f"The code of {key} is {facts[key]}."


def json_object(rng: random.Random) -> tuple[list[Message], str]:
    person = {"name": rng.choice(NAMES), "age": rng.randrange(18, 90), "city": rng.choice(CITIES)}
    prompt = f"Give me a JSON object with name {person['name']}, age {person['age']} and city {person['city']}."
    return turns(prompt), json.dumps(person)


def capital(rng: random.Random) -> tuple[list[Message], str]:
    country = rng.choice(sorted(CAPITALS))
    return turns(f"What is the capital of {country}?"), f"The capital of {country} is {CAPITALS[country]}."


def arithmetic(rng: random.Random) -> tuple[list[Message], str]:
    a, b = sorted((rng.randrange(10, 100), rng.randrange(10, 100)), reverse=True)
    sign, result = rng.choice([("+", a + b), ("-", a - b)])
    return turns(f"What is {a} {sign} {b}?"), f"{a} {sign} {b} = {result}"


def add_list(rng: random.Random) -> tuple[list[Message], str]:
    numbers = [rng.randrange(1, 40) for _ in range(rng.randrange(3, 6))]
    return turns(f"Add these numbers: {', '.join(map(str, numbers))}"), f"The sum is {sum(numbers)}."


def largest(rng: random.Random) -> tuple[list[Message], str]:
    numbers = rng.sample(range(100, 1000), rng.randrange(3, 6))
    prompt = f"What is the largest number in this list: {', '.join(map(str, numbers))}"
    return turns(prompt), f"The largest number is {max(numbers)}."


def item_count(rng: random.Random) -> tuple[list[Message], str]:
    items = rng.sample(WORDS, rng.randrange(2, 9))
    return turns(f"How many items are in this list: {', '.join(items)}?"), f"There are {len(items)} items."


def memory(rng: random.Random) -> tuple[list[Message], str]:
    name = rng.choice(NAMES)
    between = [text for question in rng.sample(sorted(CAPITALS), rng.randrange(3)) for text in asked_capital(question)]
    talk = turns(f"My name is {name}.", f"Nice to meet you, {name}!", *between, "What is my name?")
    return talk, f"Your name is {name}."


def asked_capital(country: str) -> tuple[str, str]:
    return f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."


def tool_call(rng: random.Random) -> tuple[list[Message], str]:
    city = rng.choice(CITIES)
    call = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
    return turns(f"What is the weather in {city}?"), call


def tool_answer(rng: random.Random) -> tuple[list[Message], str]:
    city, degrees = rng.choice(CITIES), rng.randrange(3, 35)
    sky = rng.choice(["sunny", "cloudy", "rainy"])
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
    result = json.dumps({"temperature": degrees, "condition": sky})
    talk: list[Message] = [
        *turns(f"What is the weather in {city}?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
    ]
    return talk, f"The weather in {city} is {sky} with {degrees} degrees."


# Name: how it is made, whether the model thinks first, whether it has a tool.
SKILLS: dict[str, tuple[Make, bool, bool]] = {
    "copy numbers": (copy_numbers, False, False),
    "copy words": (copy_words, False, False),
    "reverse": (reverse, False, False),
    "upper case": (upper, False, False),
    "count": (count, False, False),
    "Chinese count": (chinese_count, False, False),
    "key-value": (key_value, False, False),
    "key-value, thinking": (key_value, True, False),
    "JSON": (json_object, False, False),
    "capitals": (capital, False, False),
    "arithmetic": (arithmetic, False, False),
    "arithmetic, thinking": (arithmetic, True, False),
    "sums, thinking": (add_list, True, False),
    "largest, thinking": (largest, True, False),
    "item count": (item_count, False, False),
    "memory": (memory, False, False),
    "memory, thinking": (memory, True, False),
    "tool call": (tool_call, False, True),
    "tool call, thinking": (tool_call, True, True),
    "tool answer": (tool_answer, False, True),
}


def make_tasks(skill: str, count: int, seed: int = 0) -> list[Task]:
    """At most `count` different tasks of a skill, the same for the same seed."""
    make, thinking, with_tool = SKILLS[skill]
    rng = random.Random(f"{skill} {seed}")
    tasks: dict[str, Task] = {}
    for _ in range(10 * count):
        if len(tasks) == count:
            break
        messages, expected = make(rng)
        task = Task(skill, messages, expected, thinking, [WEATHER] if with_tool else None)
        tasks.setdefault(json.dumps(messages), task)
    return list(tasks.values())
