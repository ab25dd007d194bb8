#!/usr/bin/env python3
"""Many short questions for a larger run than the quickstart's: every form asked of every subject, in a drawn order.

    tools/make_prompts.py OUT.jsonl [--count N] [--seed S]

OUT gets one chat record a line (id "form/subject", category, messages), for sf-host prepare as data.prompts_conversations_path. Questions that the quickstart holds
out (recipes/data/smollm2-135m/prompts.chat.jsonl) are never among them, neither word for word nor as another form's question about a subject that only those
mention. No package is needed.
"""
import argparse
import json
import random
import sys
from pathlib import Path

from make_conversations import FAMILIES, HEROES, JOBS, NATURE, NEW_SUBJECTS, SKILLS, THINGS

HELD_OUT = Path(__file__).resolve().parents[1] / "recipes/data/smollm2-135m/prompts.chat.jsonl"

MORE_NATURE = """islands|caves|beaches|swamps|tides|waves|lakes|valleys|hills|fields|gardens|parks|spring|summer|autumn|winter|night|morning|dust|sand|mud|rocks|gold|silver|
iron|copper|diamonds|salt water|planets|comets|meteors|galaxies|space|time|numbers|maps|colors|music|dreams|friendship|kindness|courage|patience|honesty|money|trade|
schools|hospitals|libraries|museums|theaters|cinemas|newspapers|radio|television|computers|phones|the internet|robots|cars|trains|airplanes|ships|bridges|tunnels|
castles|towers|villages|cities|farms|factories|markets|kitchens|pizza|soup|salad|pasta|potatoes|tomatoes|carrots|onions|apples|bananas|oranges|grapes|strawberries|
chocolate|milk|butter|eggs|fish|lions|tigers|wolves|foxes|rabbits|mice|frogs|snakes|lizards|crocodiles|sharks|octopuses|crabs|jellyfish|eagles|parrots|ducks|chickens|
cows|sheep|goats|pigs|donkeys|camels|giraffes|zebras|monkeys|gorillas|kangaroos|koalas|pandas|polar bears|seals|bats|ladybugs|dragonflies|worms|snails|cacti|palm trees|
roses|sunflowers|tulips|grass|leaves|roots|wood|paper|glass|plastic|cotton|wool|silk|leather|bones|muscles|the heart|the brain|the eyes|teeth|skin|hair|sleep|breathing|
soccer|tennis|basketball|swimming|running|chess|painting|dancing|singing|poetry|photography|cooking|camping|hiking|fishing|sailing|skiing|yoga"""
MORE_SKILLS = """make a salad|cook pasta|bake a cake|boil an egg|cut an onion|set a table|wash the dishes|fold a shirt|iron clothes|sew a button|polish shoes|clean a window|
organize a desk|write an email|write a poem|write a diary|learn to type|learn to dance|learn chess|learn to juggle|learn to draw|learn history|learn math|pass a test|
take notes|remember a list|make a plan|set a goal|keep a secret|keep a promise|say sorry|say thank you|make a phone call|ask for help|give advice|listen well|
tell a joke|tell a story|host a party|wrap a gift|choose a book|choose a pet|feed a bird|wash a dog|groom a horse|grow herbs|grow roses|water plants|rake leaves|
build a fire|build a birdhouse|fix a chair|fix a bicycle|change a tire|read a map|use a compass|catch a train|pack a lunch|eat healthy food|drink less coffee|
walk every day|stretch in the morning|breathe calmly|relax after work|save energy|save water|recycle paper|shop on a budget|cook for friends|enjoy the rain"""
NOUN_FORMS = [
    ("define", "What does the word for {} mean? Explain in one sentence."), ("three", "Tell me three things about {}."), ("describe", "Describe {} in two sentences."),
    ("child", "Explain {} to a child in a few simple sentences."), ("why", "Why are people interested in {}? Answer briefly."), ("poem", "Write a four-line poem about {}."),
    ("story", "Write a very short story about {}."), ("question", "What is a good question to ask about {}?"), ("learn", "How can I learn more about {}? Give three short ideas."),
    ("fact", "Give me one surprising fact about {}."), ("compare", "What is {} similar to? Answer in two sentences."), ("love", "What do people like about {}?"),
    ("problem", "What problems can there be with {}? Answer in one short paragraph."), ("history", "Tell me a little about the history of {}."),
    ("future", "What could the future of {} look like? Answer in two sentences."), ("tip", "Give me one tip about {}."), ("list", "List five words that go with {}."),
    ("title", "Suggest three titles for a book about {}."), ("slogan", "Write a slogan for a club about {}."), ("letter", "Write the first two sentences of a letter about {}."),
    ("quiz", "Make one quiz question about {} and give its answer."), ("myth", "What do people often get wrong about {}?"), ("world", "What would the world be like without {}?"),
    ("day", "How does one meet {} in daily life? Answer in two sentences."), ("summary", "Summarize what you know about {} in one sentence."),
    ("teach", "How would a teacher introduce {} to a class?"), ("picture", "Describe a picture of {}."), ("sound", "What sounds or smells belong to {}?"),
    ("good", "What is good about {}, and what is not?"), ("advice", "Someone is afraid of {}. What do you say?"), ("gift", "What gift suits someone who loves {}?"),
    ("talk", "Start a friendly conversation about {}."), ("what", "What do you know about {}? Answer in two sentences."), ("facts", "Give me three short facts about {}."),
]
VERB_FORMS = [
    ("steps", "How do I {}? Give me three short steps."), ("tips", "Give me three short tips to {}."), ("cheer", "Write two sentences to encourage someone who wants to {}."),
    ("good", "Why is it good to {}? Answer in one short paragraph."), ("need", "What do I need to {}?"), ("mistake", "What mistakes do people make when they {}?"),
    ("child", "How can a child {}?"), ("time", "How long does it take to {}? Answer in one sentence."), ("habit", "How do I make it a habit to {}?"),
    ("first", "I want to {}. What should I do first?"), ("story", "Write a very short story about someone who wants to {}."), ("excuse", "Write a funny excuse for not wanting to {}."),
]


def split(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", "").split("|") if part.strip()]


def all_prompts() -> list[tuple[str, str]]:
    """(id, question), those of the quickstart's training families included."""
    reserved = {subject for subjects in NEW_SUBJECTS.values() for subject in subjects.split("|")}
    nouns = [n for text in (NATURE, MORE_NATURE, THINGS, JOBS, HEROES) for n in split(text) if n not in reserved]
    verbs = [v for text in (SKILLS, MORE_SKILLS) for v in split(text) if v not in reserved]
    asked = [(f"{form}/{subject}", text.format(subject)) for forms, subjects in ((NOUN_FORMS, nouns), (VERB_FORMS, verbs)) for form, text in forms for subject in subjects]
    asked += [(f"{family}/{subject}", text.format(subject)) for family, text, subjects in FAMILIES for subject in split(subjects)]
    held_out = {record["messages"][0]["content"] for record in map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines())}
    seen, result = set(held_out), []
    for name, question in asked:
        if question not in seen:
            seen.add(question)
            result.append((name, question))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=0, help="only so many (default: all)")
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    prompts = all_prompts()
    random.Random(arguments.seed).shuffle(prompts)
    prompts = prompts[:arguments.count or None]
    arguments.out.write_text("".join(json.dumps({"id": name, "category": name.split("/")[0], "messages": [{"role": "user", "content": question}]}) + "\n"
                                     for name, question in prompts), encoding="utf-8")
    print(f"{arguments.out}: {len(prompts)} questions")


if __name__ == "__main__":
    sys.exit(main())
