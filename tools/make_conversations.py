#!/usr/bin/env python3
"""Makes the quickstart's conversations: our prompts, answered by the target itself.

    tools/make_conversations.py --target FOLDER --out FOLDER [--only N]
    tools/make_conversations.py --target FOLDER --chat FOLDER
    tools/make_conversations.py --target FOLDER --ask "What is rain?"

A drafter learns how one target continues, so the answers must be that target's own. They are greedy (temperature 0), computed in
float32 from the folder's bfloat16 weights, and end at the end-of-turn token or after ANSWER_TOKENS. Needs what tools/setup
installs (numpy, tokenizers, safetensors, jinja2) and about five minutes on two cores; no torch.

train.jsonl and held_out.jsonl have one record a line: id ("family/subject"), input_ids, loss_mask (1 on the answer and its end of
turn). Every tenth prompt of each family is held out; no prompt is in both. train.chat.jsonl and held_out.chat.jsonl are the same as
messages, from which sf-host prepare makes records; prompts.chat.jsonl has the held-out questions and more, about subjects that no
record mentions. --chat writes these three beside token records that are there.
"""
import argparse
import json
import random
import sys
import time
from pathlib import Path

from fetch_smollm2 import fail, use_python_packages

SEED = 17
BATCH = 64
ANSWER_TOKENS = 104   # most answers end before; the rest stop there, without an end of turn
REPEATED_WORDS = 8    # an answer in which this many tokens in a row come three times is a loop and is left out

# Each family asks every one of its subjects; subjects are shared between families so that held-out prompts ask familiar things
# in a familiar way, but never the same question.
NATURE = """rain|snow|volcanoes|earthquakes|rivers|the ocean|deserts|forests|the moon|the sun|stars|rainbows|lightning|wind|clouds|mountains|
bees|butterflies|whales|dolphins|elephants|penguins|owls|spiders|ants|dogs|cats|horses|trees|flowers|mushrooms|seeds|gravity|magnets|
electricity|sound|light|heat|ice|fire|water|air|soil|bread|cheese|rice|coffee|tea|honey|salt"""
SKILLS = """learn to cook|learn to swim|sleep better|save money|grow tomatoes|bake bread|make a cup of tea|clean a kitchen|write a letter|
learn a language|read more books|drink more water|wake up early|plan a trip|take good photos|train a dog|ride a bicycle|start running|
learn the guitar|draw a face|study for an exam|make new friends|give a speech|write a story|plant a tree|care for a cat|wash a car|
pack a suitcase|use less plastic|stay calm"""
HEROES = """a brave little mouse|a lost puppy|an old sailor|a kind robot|a curious cat|a young baker|a sleepy dragon|a clever fox|a small boat|
a lonely star|a happy farmer|a shy elephant|a tiny seed|a magic pencil|a wise owl|a red balloon|a busy bee|a quiet girl|a funny clown|
a snowman|two friends|a lighthouse|a new teacher|a garden at night|a boy and his kite|a hungry bear"""
SENTENCES = """I want the report now.|Send me the file today.|Your answer is wrong.|Stop talking so loudly.|You are late again.|Give me your seat.|
I do not like this food.|Fix this problem quickly.|Do not call me tomorrow.|Move your car.|Close the door.|I need help with my homework.|
The meeting was boring.|This room is too cold.|You forgot my birthday.|Turn off the music.|I cannot come to the party.|Wait outside.|
Bring me some water.|Your dog is too noisy.|I want my money back.|Tell me your name.|Clean up this mess.|This price is too high."""
LISTS = """fruits|vegetables|animals that live in the sea|animals that can fly|things to take to the beach|things in a kitchen|healthy breakfasts|
musical instruments|winter sports|jobs in a hospital|ways to travel|colors and what they stand for|good habits|games for a rainy day|
gifts for a friend|tools for a garden|countries in Europe|large cities|things made of wood|things made of glass|words for happy|
parts of a plant|kinds of weather|school subjects|family members|things to do in spring|simple desserts|board games"""
JOBS = """a nurse|a teacher|a baker|a farmer|a pilot|a firefighter|a doctor|a painter|a gardener|a plumber|a librarian|a cook|a dentist|
a judge|a sailor|a scientist|a carpenter|a mechanic|a postman|a photographer|a tailor|a waiter|an engineer|an actor|a singer|a writer|
a police officer|a bus driver|a shepherd|a beekeeper|a clockmaker|a translator|a lifeguard|a zookeeper|an astronaut|a fisherman"""
THINGS = """a hammer|a compass|an umbrella|a bicycle|a telescope|a clock|a candle|a ladder|a needle|a mirror|a bridge|a boat|a kettle|a broom|
a pencil|a map|a bell|a rope|a lamp|a wheel|a key|a bucket|a chair|a pillow|a spoon|a basket|a whistle|a thermometer|a calendar|a camera|
a microscope|a wheelbarrow|a magnifying glass|a sewing machine|a pair of scissors|a pair of glasses"""
FAMILIES = [
    ("what", "What do you know about {}? Answer in two sentences.", NATURE),
    ("facts", "Give me three short facts about {}.", NATURE),
    ("child", "Explain {} to a child in a few simple sentences.", NATURE),
    ("why", "Why do people care about {}? Answer in one short paragraph.", NATURE),
    ("steps", "How do I {}? Give me three short steps.", SKILLS),
    ("tips", "Give me three short tips to {}.", SKILLS),
    ("cheer", "Write two sentences to encourage someone who wants to {}.", SKILLS),
    ("good", "Why is it good to {}? Answer in one short paragraph.", SKILLS),
    ("job", "What does {} do all day? Answer in two sentences.", JOBS),
    ("work", "Why is the work of {} important? Answer in one short paragraph.", JOBS),
    ("day", "Describe a day in the life of {} in three sentences.", JOBS),
    ("use", "What is {} used for? Answer in two sentences.", THINGS),
    ("describe", "Describe {} to someone who has never seen one.", THINGS),
    ("story", "Write a very short story about {}.", HEROES),
    ("poem", "Write a four-line poem about {}.", HEROES),
    ("title", "Suggest three titles for a book about {}.", HEROES),
    ("polite", "Rewrite this sentence so that it is polite: {}", SENTENCES),
    ("list", "List five {}.", LISTS),
    ("choose", "Name three {} and say one thing about each.", LISTS),
]


# More subjects, in no record: what generate and the speculative evaluation ask, beside the held-out questions.
NEW_SUBJECTS = {
    NATURE: "fog|waterfalls|glaciers|turtles|sugar", SKILLS: "learn to sing|make soup|paint a wall|remember names|walk more",
    JOBS: "a vet|a florist|a miner|a surgeon|a weaver", THINGS: "a saw|a fan|a drum|a tent|a brush",
    HEROES: "a silver fish|a young giant|a paper bird|a grumpy goat", LISTS: "kinds of bread|birds|rooms in a house|summer drinks",
    SENTENCES: "Stop wasting my time.|You are in my way.|Answer the phone.|Put that back."}


def new_prompts() -> list[tuple[str, str]]:
    return [(f"{family}/{subject}", form.format(subject)) for family, form, subjects in FAMILIES for subject in NEW_SUBJECTS[subjects].split("|")]


def all_prompts() -> list[tuple[str, str]]:
    """(id, prompt) of every family and subject, in order."""
    return [(f"{family}/{subject.strip()}", form.format(subject.strip()))
            for family, form, subjects in FAMILIES for subject in subjects.replace("\n", "").split("|")]


def held_out_ids(prompts) -> set[str]:
    """Every tenth prompt of each family, drawn with a fixed seed."""
    families = {}
    for name, _ in prompts:
        families.setdefault(name.split("/")[0], []).append(name)
    draw = random.Random(SEED)
    return {name for names in families.values() for name in draw.sample(names, max(1, len(names) // 10))}


class Target:
    """A Llama in numpy with a key-value cache. Shapes: b batch, t new tokens, T all tokens so far, h heads, g key-value heads, d head size."""

    def __init__(self, folder: Path):
        import numpy as np
        import safetensors
        self.np = np
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {}
        for name, tensor in safetensors.deserialize((folder / "model.safetensors").read_bytes()):
            bits = np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << 16
            self.weights[name] = bits.view(np.float32).reshape(tensor["shape"])
        # y = x W^T with W^T laid out once: several times faster than a transposed view for few rows
        self.matrices = {name: np.ascontiguousarray(w.T) for name, w in self.weights.items() if w.ndim == 2}

    def norm(self, x, name):
        scale = 1 / self.np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name]

    def product(self, x, name):
        matrix = self.matrices[name]
        return (x.reshape(-1, matrix.shape[0]) @ matrix).reshape(*x.shape[:-1], -1)

    def rotate(self, x, positions):
        """x [b, t, heads, d], positions [b, t]: rotates halves, as Hugging Face's Llama does."""
        np, d = self.np, self.config["head_dim"]
        angles = positions[..., None, None] * self.config["rope_theta"] ** (-np.arange(0, d, 2) / d)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = x[..., :d // 2], x[..., d // 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, ids, positions, visible, cache, start):
        """Logits [b, V] after the last of ids [b, t], which stand at cache places start..start+t-1; visible [b, t, T] says who sees whom."""
        np, c = self.np, self.config
        h, g, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        b, t = ids.shape
        end = start + t
        bias = np.where(visible, 0, -np.inf).astype(np.float32)[:, None, None]  # [b, 1, 1, t, T]
        x = self.weights["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            y = self.norm(x, layer + "input_layernorm.weight")
            q, k, v = (self.product(y, f"{layer}self_attn.{p}_proj.weight").reshape(b, t, -1, d) for p in "qkv")
            keys, values = cache[i]
            keys[:b, :, start:end] = self.rotate(k, positions).transpose(0, 2, 1, 3)
            values[:b, :, start:end] = v.transpose(0, 2, 1, 3)
            q = self.rotate(q, positions).reshape(b, t, g, h // g, d).transpose(0, 2, 3, 1, 4)  # head h reads key head h // (h/g)
            scores = q @ keys[:b, :, None, :end].swapaxes(-1, -2) / np.float32(d ** 0.5) + bias
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            seen = (scores / scores.sum(-1, keepdims=True)) @ values[:b, :, None, :end]
            x = x + self.product(seen.transpose(0, 3, 1, 2, 4).reshape(b, t, h * d), layer + "self_attn.o_proj.weight")
            y = self.norm(x, layer + "post_attention_layernorm.weight")
            gate = self.product(y, layer + "mlp.gate_proj.weight")
            x = x + self.product(gate / (1 + np.exp(-gate)) * self.product(y, layer + "mlp.up_proj.weight"), layer + "mlp.down_proj.weight")
        return self.product(self.norm(x[:, -1], "model.norm.weight"), "model.embed_tokens.weight")  # tied head

    def answer(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """Greedy continuations, each up to and including its end of turn or `limit` tokens. Prompts are padded on the left."""
        np, c = self.np, self.config
        b, width = len(prompts), max(map(len, prompts))
        lengths = np.array([len(p) for p in prompts])
        ids = np.array([[0] * (width - len(p)) + p for p in prompts])
        shape = (b, c["num_key_value_heads"], width + limit, c["head_dim"])
        cache = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for _ in range(c["num_hidden_layers"])]
        places = np.arange(width + limit)
        real = places[None] >= (width - lengths)[:, None]  # [b, T]: not padding
        visible = (places[None, None, :width] <= places[None, :width, None]) & real[:, None, :width]
        visible |= np.eye(width, dtype=bool)  # a padding row sees itself, so that no row is empty
        positions = np.maximum(places[None, :width] - (width - lengths)[:, None], 0)
        logits = self.forward(ids, positions, visible, cache, 0)
        answers, open_rows = [[] for _ in prompts], set(range(b))
        for step in range(limit):
            tokens = logits.argmax(-1)
            for row in list(open_rows):
                answers[row].append(int(tokens[row]))
                if tokens[row] == c["eos_token_id"]:
                    open_rows.discard(row)
            if not open_rows or step + 1 == limit:
                break
            start = width + step
            logits = self.forward(tokens[:, None], (lengths + step)[:, None], real[:, None, :start + 1], cache, start)
        return answers


def is_loop(tokens: list[int]) -> bool:
    seen = {}
    for i in range(len(tokens) - REPEATED_WORDS + 1):
        window = tuple(tokens[i:i + REPEATED_WORDS])
        seen[window] = seen.get(window, 0) + 1
    return any(count >= 3 for count in seen.values())


def make(target: Target, encode, decode, prompts, out: Path) -> None:
    held_out = held_out_ids(prompts)
    records, loops, started = {}, 0, time.time()
    order = sorted(prompts, key=lambda item: len(encode(item[1])))  # little padding
    for first in range(0, len(order), BATCH):
        batch = order[first:first + BATCH]
        heads = [encode(prompt) for _, prompt in batch]
        for (name, prompt), head, answer in zip(batch, heads, target.answer(heads, ANSWER_TOKENS)):
            if is_loop(answer):
                loops += 1
                continue
            records[name] = {"id": name, "input_ids": head + answer, "loss_mask": [0] * len(head) + [1] * len(answer)}
        done = first + len(batch)
        left = (time.time() - started) / done * (len(order) - done)
        name = batch[-1][0]
        print(f"conversations {done}/{len(order)}  eta {left:.0f} s  {name}: {decode(records.get(name, {'input_ids': []})['input_ids'])[-90:]!r}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for file, wanted in (("train.jsonl", False), ("held_out.jsonl", True)):
        chosen = [records[name] for name, _ in prompts if name in records and (name in held_out) == wanted]
        random.Random(SEED).shuffle(chosen)
        (out / file).write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in chosen))
        print(f"{file}: {len(chosen)} records, {sum(len(r['input_ids']) for r in chosen)} tokens, "
              f"{sum(sum(r['loss_mask']) for r in chosen)} supervised")
    print(f"left out as loops: {loops}")


def write_chat(folder: Path, decode, end_of_turn: int) -> None:
    """The token records of a folder as messages. An answer that stopped at ANSWER_TOKENS says so, and is not taught to end there."""
    prompts = dict(all_prompts())

    def write(file: str, records) -> None:
        (folder / file).write_text("".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in records), encoding="utf-8")

    for name in ("train", "held_out"):
        chats = []
        for record in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()):
            answer = [token for token, supervised in zip(record["input_ids"], record["loss_mask"]) if supervised]
            ended = answer[-1] == end_of_turn
            message = {"role": "assistant", "content": decode(answer[:-1] if ended else answer, skip_special_tokens=False)}
            if not ended:
                message["finish_reason"] = "length"
            chats.append({"id": record["id"], "category": record["id"].split("/")[0],
                          "messages": [{"role": "user", "content": prompts[record["id"]]}, message]})
        write(f"{name}.chat.jsonl", chats)
    asked = [(chat["id"], chat["messages"][0]["content"]) for chat in chats] + new_prompts()  # the held-out ones come last above
    write("prompts.chat.jsonl", [{"id": name, "category": name.split("/")[0], "messages": [{"role": "user", "content": prompt}]} for name, prompt in asked])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder (tools/fetch_smollm2.py writes it)")
    parser.add_argument("--out", type=Path, help="folder for train.jsonl and held_out.jsonl")
    parser.add_argument("--chat", type=Path, help="folder whose train.jsonl and held_out.jsonl are written as messages, too")
    parser.add_argument("--ask", help="print the target's answer to this one question instead")
    parser.add_argument("--only", type=int, default=0, help="take only the first N prompts (a trial)")
    arguments = parser.parse_args()
    if sum(given is not None for given in (arguments.out, arguments.chat, arguments.ask)) != 1:
        parser.error("give one of --out, --chat and --ask")
    use_python_packages()
    import jinja2
    from tokenizers import Tokenizer
    if not (arguments.target / "model.safetensors").is_file():
        fail(f"{arguments.target} has no model.safetensors", f"tools/fetch_smollm2.py {arguments.target}")
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    template = jinja2.Template(json.loads((arguments.target / "tokenizer_config.json").read_text())["chat_template"])

    def encode(prompt: str) -> list[int]:
        text = template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False).ids

    end_of_turn = json.loads((arguments.target / "config.json").read_text())["eos_token_id"]
    if arguments.chat is not None:
        write_chat(arguments.chat, tokenizer.decode, end_of_turn)
        return
    target = Target(arguments.target)
    if arguments.ask is not None:
        print(tokenizer.decode(target.answer([encode(arguments.ask)], ANSWER_TOKENS)[0]))
        return
    prompts = all_prompts()
    assert len({prompt for _, prompt in prompts}) == len(prompts), "a prompt is there twice"
    make(target, encode, tokenizer.decode, prompts[:arguments.only or None], arguments.out)
    write_chat(arguments.out, tokenizer.decode, end_of_turn)


if __name__ == "__main__":
    sys.exit(main())
