"""Fifty prompts of kinds that the tiny hybrid was trained on."""

WORDS = ["red fox", "hello there", "one two three", "the big old car", "93 18 40 77 62 15 88"]
LISTS = ["a, b, c", "1, 2, 3, 4", "red, blue", "cat, dog, bird", "x, y"]
SUMS = [(47, 85), (12, 9), (3, 58), (64, 31), (25, 25), (8, 77)]
PEOPLE = [("Anna", 31), ("Tom", 5), ("Eva", 61), ("Li", 40)]
HEROES = ["fox named Max", "dog named Rex", "girl named Anna", "cat", "bird"]
TASKS = ["reverses a string", "adds two numbers", "finds the maximum"]
OTHERS = """What is the capital of France?
What is the weather in Paris?
The code of alpha-17 is 4093. What is the code of alpha-17?
The code of beta-2 is 77. What is the code of beta-2?
Give me a random number with 4 digits.
Give me a random number with 8 digits.
Add these numbers: 4, 8, 15
How many words are in this: one two three four
Say the alphabet.
My name is Mike.
Hello!
请从1数到20。"""

PROMPTS = [
    *(f"Count from {start} to {start + 12}." for start in (1, 11, 21, 41, 51)),
    *(f"Repeat exactly: {words}" for words in WORDS),
    *(f"Write in upper case: {words}" for words in WORDS),
    *(f"Reverse this list: {items}" for items in LISTS),
    *(f"What is {a} + {b}?" for a, b in SUMS),
    *(f"Give me a JSON object with name {name}, age {age} and city Oslo." for name, age in PEOPLE),
    *(f"Tell me a short story about a {hero}." for hero in HEROES),
    *(f"Write a Python function that {task}." for task in TASKS),
    *OTHERS.splitlines(),
]
