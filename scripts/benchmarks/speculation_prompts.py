"""Prompts of two kinds of work: text that is given again, nearly as it was, and chat."""

import random

_FACTS = """\
Apples are red or green and grow on trees.
Lions live in Africa and hunt at night.
Water freezes at zero degrees.
Paris is the capital of France.
Bread is baked from flour, water and salt.
Spiders have eight legs and build webs.
The moon moves the tides of the sea.
Gold is heavy and does not rust.
Whales breathe air and feed their young with milk.
Coffee is grown in Brazil and Vietnam.
Iron is made hard with a little carbon.
Owls see well in the dark.
Tea was first drunk in China.
Salt is won from mines and from the sea.
Bees make honey and wax.
Rice needs much water and warm weather.
Steam drove the first engines.
Glass is melted from sand.
Cotton is spun and woven into cloth.
Penguins cannot fly but swim very fast.
Cactus plants store water in their stems.
Rome was not built in a day.
Snakes have no legs and no eyelids.
Wool keeps warm even when it is wet.
Copper carries heat and electricity well.
Mount Everest is the highest mountain.
Tigers have stripes on their skin too.
Paper was made from rags for a long time.
Venus is the hottest planet.
Dolphins call each other by name.
Bamboo grows faster than any tree.
Chess was played in India first.""".splitlines()
_ORDERS = (
    "Repeat this list, line by line.",
    "Copy this list and leave out the first line.",
    "Write this list again, and correct mistakes if there are any.",
)
_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a dog that learns to swim.",
    "Explain how a bicycle stays upright.",
    "Give me three ideas for a birthday present for my mother.",
    "Why is the sky blue?",
    "How do I boil an egg so that the yolk stays soft?",
    "Tell me about the history of the printing press.",
    "What should I pack for a week by the sea?",
    "Describe a morning in a small mountain village.",
    "How does a vaccine work?",
    "Write a polite letter that asks a neighbour to be quiet at night.",
    "What is the difference between weather and climate?",
    "Plan a day in London for a family with two children.",
    "Explain what inflation is to a child of ten years.",
    "Write a poem about autumn leaves.",
    "How can I learn to play the guitar by myself?",
)


def copy_prompts(number: int = 32) -> list[str]:
    """Lists with an order to give them again."""
    draw = random.Random(7)
    prompts = []
    for index in range(number):
        lines = draw.sample(_FACTS, 16)
        text = "\n".join(f"{place}. {line}" for place, line in enumerate(lines, 1))
        prompts.append(f"{_ORDERS[index % len(_ORDERS)]}\n\n{text}")
    return prompts


def chat_prompts() -> list[str]:
    """Questions of different kinds."""
    return list(_QUESTIONS)
