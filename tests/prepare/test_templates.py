"""Fifteen chat formats: rendered text, ids and offsets as transformers gives them (expected.json), and masks as a person would draw them; and fastokens beside tokenizers."""
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import families
from families import CONVERSATIONS, FAMILIES

import text_worker

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))

THINK = "<think>\n\n</think>\n\n"
CALL = '{"name": "tide", "arguments": {"place": "Ayr", "day": 3}}'
# What the model says in each conversation, drawn by hand. None: the template refuses this conversation.
SAID = {
    "chatml": {"two_turns": ["Hello you<|im_end|>", "Now we part.<|im_end|>"], "system": ["Hello you<|im_end|>"],
               "tool": [f"<tool_call>\n{CALL}\n</tool_call><|im_end|>", "It is high at 3.<|im_end|>"],
               "empty_think": [THINK + "Hello you<|im_end|>"]},
    # the think block of an earlier turn is not in the text; the last answer has one, and the model writes it
    "qwen3": {"two_turns": ["Hello you<|im_end|>", THINK + "Now we part.<|im_end|>"], "system": [THINK + "Hello you<|im_end|>"],
              "tool": [f"<tool_call>\n{CALL}\n</tool_call><|im_end|>", THINK + "It is high at 3.<|im_end|>"],
              "empty_think": [THINK + "Hello you<|im_end|>"],
              "reasoning": ["Hello you<|im_end|>", "<think>\nThey leave.\n</think>\n\nNow we part.<|im_end|>"],
              "inline_think": ["Hello you<|im_end|>", "<think>\nThey leave.\n</think>\n\nNow we part.<|im_end|>"]},
    "thinking_prompt": {"two_turns": ["Hello you<|im_end|>", "Now we part.<|im_end|>"], "system": ["Hello you<|im_end|>"],
                        "tool": ['<tool_call>tide{"place": "Ayr", "day": 3}</tool_call><|im_end|>', "It is high at 3.<|im_end|>"],
                        "empty_think": ["Hello you<|im_end|>"]},
    "generation_marks": {"two_turns": ["Hello you<|im_end|>\n", "Now we part.<|im_end|>\n"], "system": ["Hello you<|im_end|>\n"],
                         "tool": ["It is high at 3.<|im_end|>\n"], "empty_think": [THINK + "Hello you<|im_end|>\n"]},
    "llama3": {"two_turns": ["Hello you<|eot_id|>", "Now we part.<|eot_id|>"], "system": ["Hello you<|eot_id|>"],
               "tool": ['{"name": "tide", "parameters": {"place": "Ayr", "day": 3}}<|eot_id|>', "It is high at 3.<|eot_id|>"],
               "empty_think": [THINK + "Hello you<|eot_id|>"]},
    "mistral": {"two_turns": [" Hello you</s>", " Now we part.</s>"], "system": [" Hello you</s>"],
                "tool": [f"[TOOL_CALLS][{CALL}]</s>", " It is high at 3.</s>"], "empty_think": [" " + THINK + "Hello you</s>"]},
    "gemma": {"two_turns": ["Hello you<end_of_turn>", "Now we part.<end_of_turn>"], "system": None, "tool": None,
              "empty_think": [THINK + "Hello you<end_of_turn>"]},
    # these have no place for tool calls: the answer that is one is left out
    "phi3": {"two_turns": ["Hello you<|end|>", "Now we part.<|end|>"], "system": ["Hello you<|end|>"], "tool": ["It is high at 3.<|end|>"],
             "empty_think": [THINK + "Hello you<|end|>"]},
    "phi4": {"two_turns": ["Hello you<|im_end|>", "Now we part.<|im_end|>"], "system": ["Hello you<|im_end|>"], "tool": ["It is high at 3.<|im_end|>"],
             "empty_think": [THINK + "Hello you<|im_end|>"]},
    "zephyr": {"two_turns": ["Hello you</s>", "Now we part.</s>"], "system": ["Hello you</s>"], "tool": ["It is high at 3.</s>"],
               "empty_think": [THINK + "Hello you</s>"]},
    "vicuna": {"two_turns": [" Hello you</s>", " Now we part.</s>"], "system": [" Hello you</s>"], "tool": [" It is high at 3.</s>"],
               "empty_think": [" " + THINK + "Hello you</s>"]},
    "deepseek": {"two_turns": ["Hello you<｜end▁of▁sentence｜>", "Now we part.<｜end▁of▁sentence｜>"], "system": ["Hello you<｜end▁of▁sentence｜>"],
                 "tool": ['<｜tool▁call▁begin｜>tide<｜tool▁sep｜>{"place": "Ayr", "day": 3}<｜tool▁call▁end｜><｜end▁of▁sentence｜>',
                          "It is high at 3.<｜end▁of▁sentence｜>"],
                 "empty_think": ["\n\nHello you<｜end▁of▁sentence｜>"]},
    # <|end|> of an earlier answer stands for the <|return|> with which the model ended it: it never says <|end|> there
    "harmony": {"two_turns": ["<|channel|>final<|message|>Hello you", "<|channel|>final<|message|>Now we part.<|return|>"],
                "system": ["<|channel|>final<|message|>Hello you<|return|>"],
                "tool": [' to=functions.tide<|channel|>commentary json<|message|>{"place": "Ayr", "day": 3}<|call|>', "<|channel|>final<|message|>It is high at 3.<|return|>"],
                "empty_think": ["<|channel|>final<|message|>" + THINK + "Hello you<|return|>"],
                "reasoning": ["<|channel|>final<|message|>Hello you",
                              "<|channel|>analysis<|message|>They leave.<|end|><|start|>assistant<|channel|>final<|message|>Now we part.<|return|>"]},
    # generation ends with the next role's token, which therefore is the model's
    "glm": {"two_turns": ["\n<think></think>\nHello you<|user|>", "\n<think></think>\nNow we part."], "system": ["\n<think></think>\nHello you"],
            "tool": ['\n<think></think>\n\n<tool_call>tide\n{"place": "Ayr", "day": 3}\n</tool_call>', "\n<think></think>\nIt is high at 3."],
            "empty_think": ["\n<think></think>\n<think>\n\n</think>\n\nHello you"]},
    "granite": {"two_turns": ["Hello you<|end_of_text|>", "Now we part.<|end_of_text|>"], "system": ["Hello you<|end_of_text|>"],
                "tool": [f"<|tool_call|>{CALL}<|end_of_text|>", "It is high at 3.<|end_of_text|>"], "empty_think": [THINK + "Hello you<|end_of_text|>"]},
}
# What of it is thought and not said, where the template shows thinking.
THOUGHT = {"qwen3": {"reasoning": ["", "<think>\nThey leave.\n</think>\n\n"], "inline_think": ["", "<think>\nThey leave.\n</think>\n\n"], "empty_think": [THINK]},
           "chatml": {"inline_think": ["<think>\nThey greet.\n</think>\n\n", "<think>\nThey leave.\n</think>\n\n"]},
           "harmony": {"reasoning": ["", "<|channel|>analysis<|message|>They leave.<|end|><|start|>assistant<|channel|>final<|message|>"]}}


class Templates(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-templates-"))
        cls.workers = dict(families.workers(cls.place))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def rows(self, name, case, max_length=0):
        messages, tools = CONVERSATIONS[case]
        worker = self.workers[name]
        worker.max_length = max_length
        return families.rows(worker, [json.dumps({"messages": messages, "tools": tools}).encode()])[0]

    def said(self, name, row, begin=0):
        decode = self.workers[name].tokenizer.decode
        return [decode(row["ids"][answer[begin]:answer[1]], skip_special_tokens=False) for answer in row["answers"]]

    def test_text_ids_and_offsets_are_those_of_transformers(self):
        compared = 0
        for name, worker in self.workers.items():
            for case, (messages, tools) in CONVERSATIONS.items():
                expected = EXPECTED[f"{name}/{case}"]
                with self.subTest(f"{name}/{case}"):
                    if "raises" in expected:
                        with self.assertRaises(Exception) as raised:
                            worker.template.text(messages, tools)
                        self.assertEqual(str(raised.exception), expected["raises"])
                        continue
                    text = worker.template.text(messages, tools)
                    encoding = worker.encode(text)
                    self.assertEqual(text, expected["text"])
                    self.assertEqual(encoding.ids.tolist(), expected["ids"])
                    self.assertEqual([n for pair in encoding.offsets for n in pair], expected["offsets"])
                    compared += 1
        self.assertEqual(compared, 8 * len(FAMILIES) - 2)

    def test_masks_are_as_drawn_by_hand(self):
        for name, cases in SAID.items():
            for case, said in cases.items():
                with self.subTest(f"{name}/{case}"):
                    row = self.rows(name, case)
                    if said is None:
                        self.assertEqual(row["skip"], "template")
                    else:
                        self.assertEqual(self.said(name, row), said)

    def test_every_family_has_its_five_masks_drawn(self):
        """Two turns, a system turn, a tool call, an empty think block; the fifth is the cut in the middle of an answer, which all go through."""
        self.assertEqual(set(SAID), set(FAMILIES))
        for name, cases in SAID.items():
            self.assertLessEqual({"two_turns", "system", "tool", "empty_think"}, set(cases), name)

    def test_thinking_is_told_from_saying(self):
        for name, cases in THOUGHT.items():
            for case, thought in cases.items():
                with self.subTest(f"{name}/{case}"):
                    row = self.rows(name, case)
                    decode = self.workers[name].tokenizer.decode
                    self.assertEqual([decode(row["ids"][a:r], skip_special_tokens=False) for a, _, r in row["answers"]], thought)

    def test_an_answer_that_is_cut_in_the_middle_keeps_its_head(self):
        # two tokens of what is said; in three families other tokens of the model's own stand before it
        heads = {"qwen3": THINK + "Now we", "glm": "\n<think></think>\nNow we", "harmony": "<|channel|>final<|message|>Now we", "mistral": " Now we", "vicuna": " Now we"}
        for name, cases in SAID.items():
            with self.subTest(name):
                whole = self.rows(name, "two_turns")
                head = heads.get(name, "Now we")
                self.assertTrue(cases["two_turns"][1].startswith(head))
                first = whole["answers"][1][0]
                length = next(n for n in range(first, len(whole["ids"])) if self.workers[name].tokenizer.decode(whole["ids"][first:n], skip_special_tokens=False) == head)
                row = self.rows(name, "two_turns", length)
                self.assertEqual((len(row["ids"]), row["tokens"]), (length, whole["tokens"]))
                self.assertEqual(row["ids"], whole["ids"][:length])
                self.assertEqual(self.said(name, row), [cases["two_turns"][0], head])

    def test_blanks_around_an_answer_are_kept_or_trimmed_as_the_template_does(self):
        self.assertEqual(self.said("chatml", self.rows("chatml", "blanks")), ["a\n\n\nb   c\n<|im_end|>"])
        self.assertEqual(self.said("llama3", self.rows("llama3", "blanks")), ["a\n\n\nb   c<|eot_id|>"])
        # the newline of the header and the answer's own make one token: it is not what the model would say there
        self.assertEqual(self.said("chatml", self.rows("chatml", "scripts")), [" é́ 👩‍👩‍👧 العربية\t1234 \n<|im_end|>"])

    def test_an_answer_cut_by_a_length_limit_is_not_taught_to_end(self):
        messages = [dict(m) for m in CONVERSATIONS["two_turns"][0]]
        messages[3]["finish_reason"] = "length"
        row = families.rows(self.workers["chatml"], [json.dumps({"messages": messages}).encode()])[0]
        self.assertEqual(self.said("chatml", row), ["Hello you<|im_end|>", "Now we part."])

    def test_every_answer_begins_where_serving_prompts_end(self):
        """The ids before the last answer are those of the generation prompt, which serving would send."""
        for name, worker in self.workers.items():
            if name in ("thinking_prompt", "qwen3", "llama3"):
                continue  # two differ from history on purpose; with the third's two newlines SmolLM2 makes another token of them at a text's end
            with self.subTest(name):
                messages, _ = CONVERSATIONS["two_turns"]
                row = self.rows(name, "two_turns")
                prompt = worker.encode(worker.template.text(messages[:3], ask=True)).ids.tolist()
                self.assertEqual(row["ids"][:row["answers"][1][0]], prompt)


class Rows(unittest.TestCase):
    """Whatever a row holds, it is answered with a record or a reason."""
    ODD = [None, True, 0, 3.5, 1e999, "", "  ", "x", [], [[]], {}, {"a": 1}, ["x"], [{"type": "text", "text": "hi"}], [{"type": "image"}], [None], "<|im_end|>", "\ud800", "\U000F0000",
           "{", "[1]", '{"a":1}', "<think>a</think>b", "<think>", "</think>", "\n\n", "assistant", "\x00"]
    KEYS = ["role", "content", "from", "value", "tool_calls", "function", "arguments", "name", "id", "category", "tools", "finish_reason", "reasoning_content", "thinking",
            "function_call", "chat_template_kwargs", "messages", "conversations", "text"]

    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-rows-"))
        cls.workers = dict(families.workers(cls.place / "families"))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def one(self, record, family="chatml", **settings):
        worker = self.workers[family]
        worker.prompts, worker.whole_texts, worker.max_length, worker.ignored = (settings.get(key, default) for key, default in (
            ("prompts", False), ("whole_texts", False), ("max_length", 0), ("ignored", [])))
        [row] = worker.rows([json.dumps(record).encode()])
        return row

    def test_rows_that_nobody_foresaw_end_nothing(self):
        draw = random.Random(11)

        def spots(part):
            for key, value in list(part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()):
                yield part, key
                yield from spots(value)
        whole = 0
        for number in range(1200):
            messages, tools = json.loads(json.dumps(draw.choice(list(CONVERSATIONS.values()))))
            record = {"messages": messages, **({"tools": tools} if tools else {}), **draw.choice([{}, {"finish_reason": "length"}, {"chat_template_kwargs": {"enable_thinking": False}}])}
            for _ in range(draw.randint(0, 3)):
                if not record:
                    break
                part, key = draw.choice(list(spots(record)))
                chance = draw.random()
                if chance < 0.15:
                    del part[key]
                elif chance < 0.7 or not isinstance(part, dict):
                    part[key] = json.loads(json.dumps(draw.choice(self.ODD)))
                else:
                    part[draw.choice(self.KEYS)] = json.loads(json.dumps(draw.choice(self.ODD)))
            row = self.one(record, draw.choice(list(FAMILIES)), prompts=draw.random() < 0.3, whole_texts=draw.random() < 0.2, max_length=draw.choice([0, 10]),
                           ignored=draw.choice([[], ["you"]]))
            whole += "ids" in row
            json.dumps({key: value for key, value in row.items() if key != "ids"}, ensure_ascii=False).encode()  # what sf-host is told is UTF-8
            for begin, end, thought in row.get("answers", []):
                self.assertTrue(0 <= begin <= thought <= end <= row["tokens"], (record, row))
        self.assertTrue(300 < whole < 1000, whole)

    def test_a_row_that_stopped_at_a_limit_is_a_prompt_like_any_other(self):
        record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "finish_reason": "length"}
        self.assertEqual(self.one(record, prompts=True)["ids"].tolist(), self.one({**record, "finish_reason": "stop"}, prompts=True)["ids"].tolist())
        self.assertLess(self.one(record)["answers"][0][1], self.one({**record, "finish_reason": "stop"})["answers"][0][1])

    def test_contents_and_options_that_are_no_text_or_not_theirs_to_set_are_skipped_with_a_reason(self):
        def reason(content="Hi", **more):
            return self.one({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Hello you"}], **more}).get("skip")
        self.assertIsNone(reason())
        self.assertIsNone(reason(["Hi ", {"type": "text", "text": "you"}]))
        for content in (5, True, {"a": 1}, [["x"]], 1e999):
            self.assertEqual(reason(content), "bad-message", content)
        self.assertIsNone(reason(chat_template_kwargs={"enable_thinking": False}))
        for options in (3, "x", [], {"messages": []}, {"add_generation_prompt": True}, {"tools": None}):
            self.assertEqual(reason(chat_template_kwargs=options), "bad-options", options)
        tool = {"messages": [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "", "tool_calls": [families.CALL]}, {"role": "tool", "content": {"high": 3}},
                             {"role": "assistant", "content": "At 3."}]}
        self.assertIn("ids", self.one(tool))

    def test_a_message_that_only_calls_a_tool_keeps_its_call(self):
        def talk(**said):
            return families.rows(self.workers["qwen3"], [json.dumps({"tools": families.TOOLS, "messages": [
                {"role": "user", "content": "Tide?"}, {"role": "assistant", **said}, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "At 3."}]}).encode()])[0]
        whole = talk(content="", tool_calls=[families.CALL])
        self.assertEqual(len(whole["answers"]), 2)
        for said in ({"tool_calls": [families.CALL]}, {"content": None, "tool_calls": [families.CALL]}, {"function_call": families.CALL["function"]}):
            self.assertEqual(talk(**said), whole)

    def test_what_a_tool_returned_may_be_nothing(self):
        """The answer that called it ends where it does before any other result: no turn of a tool is the model's."""
        shown = 0
        for family, worker in self.workers.items():
            def said(*results):
                talk = [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "", "tool_calls": [families.CALL] * len(results)},
                        *({"role": "tool", "content": one, "name": "tide", "tool_call_id": "call00007"} for one in results), {"role": "assistant", "content": "At 3."}]
                text, answers, _, _ = worker.template.places(talk, families.TOOLS)
                return [text[answer.begin:answer.end] for answer in answers]
            for results in (("high",), ("high", "low")):
                try:
                    whole = said(*results)
                except Exception:  # this template has no tools, or one call at a time
                    continue
                shown += len(whole) == 2
                for empty in (("", *results[1:]), (*results[1:], "  "), ("",) * len(results)):
                    self.assertEqual(said(*empty), whole, (family, empty))
        self.assertGreater(shown, 8)

    def test_answers_are_what_stands_between_what_serving_sends_and_the_turn_after(self):
        """Conversations that nobody foresaw, with empty contents in all places: where the prompt and the conversation up to an answer are beginnings of the whole, the answer
        is what stands between them."""
        draw = random.Random(21)

        def content():
            return draw.choice(["Hi there", "x", "", "  ", "a\n", "  b", "Hi <b>", "1. one\n2. two", '{"a": 1}', "\n\nq\n\n", "assistant", "user\nuser"])

        def talk():
            messages = [{"role": "system", "content": content()}] * (draw.random() < 0.3)
            for _ in range(draw.randint(1, 3)):
                messages.append({"role": "user", "content": content()})
                for _ in range(draw.choice([0, 0, 1, 2])):
                    calls = draw.choice([1, 1, 2])
                    messages.append({"role": "assistant", "content": draw.choice(["", "Let me look."]), "tool_calls": [families.CALL] * calls})
                    messages += [{"role": "tool", "content": content(), "name": "tide", "tool_call_id": "call00007"} for _ in range(calls)]
                messages.append({"role": "assistant", "content": content()})
            return messages
        compared = 0
        for family, worker in self.workers.items():
            for _ in range(60):
                messages = talk()
                tools = families.TOOLS if any("tool_calls" in one for one in messages) else None
                try:
                    text, answers, _, notes = worker.template.places(messages, tools)
                except Exception:  # a Skip, or the template's own refusal
                    continue
                turns = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
                for i, answer in zip(turns, answers if len(answers) == len(turns) and not worker.template.has_marks else []):
                    try:
                        begin, end = (worker.template.text(messages[:i + more], tools, ask=not more) for more in (0, 1))
                    except Exception:
                        continue
                    if not (text.startswith(begin) and text.startswith(end)):
                        continue
                    compared += 1
                    expected, found = text[len(begin):len(end)].rstrip(), text[answer.begin:answer.end].rstrip()
                    if family == "phi3":  # ends each conversation with a token of its own
                        expected = expected.removesuffix("<|endoftext|>").rstrip()
                    if family == "glm":  # an answer ends with the mark of the next turn, at which it stops
                        found = next((found.removesuffix(mark) for mark in ("<|user|>", "<|observation|>") if found.endswith(mark)), found).rstrip()
                    self.assertEqual(found, expected, (family, messages[:i + 1]))
        self.assertGreater(compared, 600)

    def test_nobody_elses_turn_is_supervised_in_texts_that_were_rendered_before(self):
        compared = 0
        for family, worker in self.workers.items():
            for name in ("two_turns", "tool"):
                messages, tools = CONVERSATIONS[name]
                try:
                    text = worker.template.text(messages, tools)
                    answers = worker.template.answers_in_text(text)
                except Exception:  # a Skip, or the template's own refusal
                    continue
                said = "".join(text[answer.begin:answer.end] for answer in answers)
                for message in messages:
                    if message["role"] in ("user", "tool"):
                        self.assertNotIn(message["content"], said, (family, name))
                        compared += 1
        self.assertGreater(compared, 30)

    def test_an_answer_without_a_word_that_no_template_closes_ends_before_the_next_turn(self):
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "  "}, {"role": "assistant", "content": "x"}]
        text, answers, _, _ = self.workers["harmony"].template.places(talk)
        self.assertEqual([text[answer.begin:answer.end] for answer in answers], ["<|channel|>final<|message|>", "<|channel|>final<|message|>x<|return|>"])

    def test_where_no_place_of_a_later_turn_is_known_its_ends_are_not_the_answers(self):
        odd = text_worker.Renderer(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | length }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", {}, ["<|im_start|>", "<|im_end|>"], ["<|im_end|>"])  # marks would change what it writes
        talk = [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "", "tool_calls": [families.CALL]}, {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "At 3."}]
        text, answers, _, _ = odd.places(talk)
        self.assertEqual([text[answer.begin:answer.end] for answer in answers], ["0<call>tide<|im_end|>", "5<|im_end|>"])

    def test_columns_of_other_spellings_may_be_null(self):
        plain = self.one({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})["ids"].tolist()
        talk = [{"role": None, "content": None, "from": "human", "value": "Hi"}, {"role": None, "content": None, "from": "gpt", "value": "Hello"}]
        self.assertEqual(self.one({"messages": None, "text": None, "conversations": talk})["ids"].tolist(), plain)

    def test_what_is_nested_without_an_end_is_a_reason_and_no_end_of_the_process(self):
        deep = "[" * 200000
        for more, reason in (({"tool_calls": deep}, "bad-message"), ({"tool_calls": [{"function": {"name": "tide", "arguments": deep}}]}, None)):
            row = self.one({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", **more}]})
            self.assertEqual(row.get("skip"), reason, row)
        self.assertEqual(self.one({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": deep}).get("skip"), "bad-tools")

    def test_tools_that_the_template_does_not_show_are_noted(self):
        record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}], "tools": families.TOOLS}
        for family in ("qwen3", "zephyr"):
            shown = self.workers[family].template.text(record["messages"], families.TOOLS) != self.workers[family].template.text(record["messages"])
            self.assertEqual(self.one(record, family).get("notes", []), [] if shown else ["tools-not-in-template"], family)
            self.assertEqual(shown, family == "qwen3")


class Fast(unittest.TestCase):
    """fastokens stands for tokenizers where both agree: ids are asked of it, and places follow from the tokens' lengths."""
    CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
    END = r"| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    SPLITS = {
        "digits": None,  # SmolLM2's own
        "gpt2": [],
        "llama3": [rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}" + END % ""],
        "qwen2": [rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}" + END % ""],
        "o200k": [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:{CONTRACTIONS})?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:{CONTRACTIONS})?|\p{{N}}{{1,3}}" + END % "/"],
        "deepseek": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                     r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""],
        "own": [r"\p{L}+ \p{L}+|\p{N}+"],
    }
    LETTERS = list("aZétslrem  \n\t\r'’.,(-_5 9\u00a0\u3000日本é́🙂ß/\\]`\u200b\u0301\x1c\x85½") + ["'s", "'LL", " \n", "\n\n", "  ", "the", "ing", "->", "<|im_start|>"]

    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-fast-"))
        families.write_folders(cls.place, ("chatml",))
        cls.file = cls.place / "chatml/tokenizer.json"
        known = json.loads(cls.file.read_text(encoding="utf-8"))  # less of it is read faster
        model, added = known["model"], {token["content"] for token in known["added_tokens"]}
        model["vocab"] = {token: number for token, number in model["vocab"].items() if number < 2000 or token in added}
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
        cls.text = json.dumps(known)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def worker(self, change=lambda tokenizer: None, **settings):
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_str(self.text)
        change(tokenizer)
        tokenizer.save(str(self.file))
        return text_worker.TextWorker({"target": str(self.place / "chatml"), **settings})

    def test_tokens_and_places_are_those_of_tokenizers(self):
        from tokenizers import Regex, normalizers, pre_tokenizers, processors
        draw = random.Random(3)
        for (name, patterns), trims in itertools.product(self.SPLITS.items(), (False, True)):
            nfc = trims and name in ("digits", "qwen2")
            def change(tokenizer):
                if patterns is not None:
                    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated") for one in patterns]
                                                                      + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])
                tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims, add_prefix_space=False)
                if nfc:
                    tokenizer.normalizer = normalizers.NFC()
            with self.subTest(name, trims=trims):
                worker = self.worker(change)
                self.assertIn("fastokens", worker.encoder.split("(")[0])
                texts = ["".join(draw.choice(self.LETTERS) for _ in range(draw.randint(1, 60))) for _ in range(150)]
                for text, found in zip(texts, worker.encode_all(texts)):
                    whole = text_worker.Encoded(worker.tokenizer.encode(text, add_special_tokens=False), len(text))
                    self.assertEqual(found.ids.tolist(), whole.ids.tolist(), repr(text))
                    self.assertEqual(found.offsets, whole.offsets, repr(text))
                    for begin, end in ((draw.randint(0, len(text)), draw.randint(0, len(text))) for _ in range(8)):
                        self.assertEqual(found.inside(begin, end), whole.inside(begin, end), (text, begin, end))
                        self.assertEqual(found.touching(begin, end), whole.touching(begin, end), (text, begin, end))
                if not nfc:
                    self.assertTrue(all(isinstance(one, text_worker.Bytewise) for one in worker.encode_all(texts)))

    def test_a_tokenizer_whose_tokens_are_not_bytes_is_left_to_tokenizers_and_says_so(self):
        from tokenizers import normalizers, pre_tokenizers
        for change in (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()), lambda t: setattr(t, "normalizer", normalizers.NFKC()),
                       lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))):
            worker = self.worker(change)
            self.assertIsNone(worker.fast)
            self.assertRegex(worker.facts["encoder"], r"^tokenizers [\d.]+ \(not byte-level BPE\)$")
            self.assertEqual(worker.encode("a b").ids.tolist(), worker.tokenizer.encode("a b", add_special_tokens=False).ids)

    def test_texts_that_a_tokenizer_changes_are_left_to_tokenizers_one_by_one(self):
        from tokenizers import AddedToken, normalizers
        def change(tokenizer):
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.add_special_tokens([AddedToken("<|wide|>", rstrip=True, lstrip=True, normalized=False)])
        worker = self.worker(change)
        texts = ["e\u0301 is two", "é is one", "blanks \n <|wide|>  \n around", "no<|wide|>blanks"]
        found = worker.encode_all(texts)
        self.assertEqual([type(one).__name__ for one in found], ["Encoded", "Bytewise", "Encoded", "Bytewise"])
        for text, one in zip(texts, found):
            whole = worker.tokenizer.encode(text, add_special_tokens=False)
            self.assertEqual((one.ids.tolist(), one.offsets), (whole.ids, whole.offsets), text)

    def test_a_byte_that_has_no_token_and_a_blank_of_one_library_leave_their_text_to_tokenizers(self):
        worker = self.worker()
        self.assertIsNone(worker.tokenizer.token_to_id("Ą"))  # byte 4
        texts = ["before", "with \x04 in it", "behind", "é", "a blank to one library\n\u180e's"]
        found = worker.encode_all(texts)
        self.assertEqual([type(one).__name__ for one in found], ["Bytewise", "Encoded", "Bytewise", "Bytewise", "Encoded"])
        for text, one in zip(texts, found):
            self.assertEqual(one.ids.tolist(), worker.tokenizer.encode(text, add_special_tokens=False).ids, text)

    def test_a_faster_library_that_disagrees_is_refused_at_the_start_or_ends_the_run(self):
        from tokenizers import Tokenizer, pre_tokenizers
        other = Tokenizer.from_str(self.text)
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # numbers are not parted into digits
        wrong = lambda description: json.loads(other.to_str())
        with mock.patch.object(text_worker, "with_one_split", wrong):
            refused = self.worker()
            self.assertIsNone(refused.fast)
            self.assertIn("has other tokens for", refused.facts["encoder"])
            with mock.patch.object(text_worker, "probe_texts", lambda added: ["no number here"]):
                worker = self.worker()
        self.assertIsNotNone(worker.fast)
        line = json.dumps({"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "all   1 of 8"}]}).encode()
        with self.assertRaises(text_worker.Fault) as fault:
            worker.rows([line])
        self.assertIn("gives other tokens for a text", str(fault.exception))
        self.assertIn("SF_FAST_TOKENIZER=0", fault.exception.fix)
        with mock.patch.dict(os.environ, SF_FAST_TOKENIZER="0"):
            self.assertIsNone(self.worker().fast)

    def test_for_a_small_input_the_faster_library_is_not_loaded_and_the_answers_are_the_same(self):
        self.worker()
        lines = [json.dumps({"messages": [{"role": "user", "content": "".join(draw.choice(self.LETTERS) for _ in range(40))}, {"role": "assistant", "content": "So it's 12."}],
                             "id": number}).encode() for draw in [random.Random(7)] for number in range(150)]
        asked = b"".join([b'{"op": "rows", "count": 150}\n', *(line + b"\n" for line in lines)])
        script = "import sys, text_worker; code = text_worker.main(); sys.exit(3 if 'fastokens' in sys.modules else code)"

        def answers(size, wanted=None):
            settings = json.dumps({"target": str(self.place / "chatml"), "input_bytes": size, "packages": [str(families.PACKAGES)], "ignored": ["it's"]}).encode() + b"\n"
            environment = {**{key: value for key, value in os.environ.items() if key != "SF_FAST_TOKENIZER"}, "PYTHONPATH": str(Path(text_worker.__file__).parent),
                           "PYTHONDONTWRITEBYTECODE": "1", **({"SF_FAST_TOKENIZER": wanted} if wanted else {})}
            done = subprocess.run([sys.executable, "-c", script], input=settings + asked, capture_output=True, env=environment, timeout=120)
            _, ready, rest = done.stdout.split(b"\n", 2)
            return done.returncode, json.loads(ready)["ready"]["encoder"], rest

        border = text_worker.FAST_FROM * text_worker.TextWorker({"target": str(self.place / "chatml"), "input_bytes": 0}).facts["tokens"]
        code, encoder, small = answers(border - 1)
        self.assertEqual(code, 0, "fastokens was loaded")
        self.assertRegex(encoder, r"^tokenizers [\d.]+ \(less than 40 bytes of input for each token of the vocabulary\)$")
        code, encoder, large = answers(border)
        self.assertEqual(code, 3, "fastokens was not loaded")
        self.assertRegex(encoder, "^fastokens")
        self.assertGreater(len(small), 10000)
        self.assertEqual(small, large)
        self.assertEqual(answers(0, "1"), (code, encoder, large))
        self.assertEqual(answers(border, "0")[::2], (0, small))

    def test_one_row_in_a_hundred_is_checked(self):
        worker = self.worker()
        with mock.patch.object(worker.fast, "differs", wraps=worker.fast.differs) as asked:
            worker.encode_all(["a"] * 250)
            worker.encode_all(["b"] * 100)
        self.assertEqual(asked.call_count, 4)


class Records(unittest.TestCase):
    """What rows may look like, and what is said of those that can't be used."""

    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-rows-"))
        families.write_folders(cls.place, ["chatml"])
        cls.worker = text_worker.TextWorker({"target": str(cls.place / "chatml"), "ignored": ["<think>\n\n</think>\n\n"]})

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def row(self, record):
        return families.rows(self.worker, [record if isinstance(record, bytes) else json.dumps(record).encode()])[0]

    def test_three_spellings_of_one_conversation_give_the_same_ids(self):
        openai = self.row({"messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello you"}]})
        sharegpt = self.row({"conversations": [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello you"}]})
        parts = self.row({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
                                       {"role": "assistant", "content": "Hello you"}]})
        text = self.row({"text": EXPECTED["chatml/two_turns"]["text"]})
        self.assertEqual(openai["ids"], sharegpt["ids"])
        self.assertEqual(openai["ids"], parts["ids"])
        self.assertEqual(text["ids"], EXPECTED["chatml/two_turns"]["ids"])
        two_turns = self.row({"messages": CONVERSATIONS["two_turns"][0]})
        self.assertEqual([a[:2] for a in text["answers"]], [a[:2] for a in two_turns["answers"]])

    def test_tool_arguments_may_be_a_text(self):
        messages, tools = CONVERSATIONS["tool"]
        spelled = json.loads(json.dumps(messages))
        spelled[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(families.CALL["function"]["arguments"])
        spelled[1]["content"] = None
        self.assertEqual(self.row({"messages": spelled, "tools": json.dumps(tools)})["ids"], EXPECTED["chatml/tool"]["ids"])

    def test_ignored_texts_are_found(self):
        row = self.row({"messages": CONVERSATIONS["empty_think"][0]})
        [[first, last]] = row["ignored"]
        self.assertEqual(self.worker.tokenizer.decode(row["ids"][first:last]), "<think>\n\n</think>\n\n")

    def test_rows_that_can_not_be_used_say_why(self):
        ask, say = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        for record, reason in [
                (b'{"messages": [', "json"), (b"[1, 2]", "json"), (b'{"messages": "\xff"}', "encoding"), ({"messages": []}, "empty"), ({"text": "  "}, "empty"),
                ({"prompt": "x"}, "no-conversation"), ({"messages": [ask]}, "no-answer"), ({"messages": [say]}, "no-question"),
                ({"messages": [{"role": "alien", "content": "x"}, say]}, "unknown-role"), ({"messages": ["x"]}, "bad-message"), ({"messages": {"a": 1}}, "bad-message"),
                ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown-role"), ({"messages": [{"content": "x"}]}, "unknown-role"),
                ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, say]}, "not-text"),
                ({"messages": [ask, say], "tools": {"a": 1}}, "bad-tools"), ({"messages": [ask, {**say, "content": "half a pair: \ud83d"}]}, "encoding"),
                ({"messages": [ask, {**say, "content": "\U000f0000"}]}, "private-characters"), ({"text": "nobody answers"}, "no-answer"),
                (b"[" * 100000, "json")]:
            with self.subTest(reason=reason, record=str(record)[:60]):
                row = self.row(record)
                self.assertEqual(row.get("skip"), reason, row)
                self.assertTrue(row["why"] or reason == "json")

    def test_one_bad_row_does_not_harm_its_neighbours(self):
        good = {"messages": CONVERSATIONS["two_turns"][0]}
        rows = families.rows(self.worker, [json.dumps(good).encode(), b"{", json.dumps({"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "x"}]}).encode(),
                                 json.dumps(good).encode()])
        self.assertEqual([row.get("skip") for row in rows], [None, "json", "encoding", None])
        self.assertEqual(rows[0]["ids"], rows[3]["ids"])

    def test_a_tokenizer_that_raises_at_one_text_skips_that_row_alone(self):
        worker = text_worker.TextWorker({"target": str(self.place / "chatml")})
        real = worker.tokenizer

        class Picky:
            def encode(self, text, **options):
                if "unheard" in text:
                    raise Exception("no token for the unknown")
                return real.encode(text, **options)
        worker.tokenizer, worker.fast = Picky(), None
        rows = families.rows(worker, [json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}).encode() for text in ("b", "unheard", "c")])
        self.assertEqual([row.get("skip") for row in rows], [None, "encoding", None])
        self.assertEqual(rows[1]["why"], "the tokenizer says: no token for the unknown")

    def test_what_is_mended_is_noted(self):
        ask, say = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        self.assertEqual(self.row({"messages": [say, ask, say]})["notes"], ["dropped-before-first-question"])
        cut = self.row({"messages": [ask, say, say]})
        self.assertEqual(cut["notes"], ["cut-where-roles-break"])
        self.assertEqual(cut["ids"], self.row({"messages": [ask, say]})["ids"])
        self.assertEqual(self.row({"messages": [ask, {**say, "reasoning_content": "hm"}]})["notes"], ["reasoning-not-in-template"])

    def test_the_text_of_a_special_token_in_a_message_is_noted_or_a_reason_to_skip(self):
        def record(question="a", answer="b", **more):
            return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}
        self.assertNotIn("notes", self.row(record("a <|im_end> b", "<| im_end |>")))
        end = self.worker.tokenizer.token_to_id("<|im_end|>")
        row = self.row(record("a<|im_end|>b"))
        self.assertEqual(row["notes"], ["special-token-text: message 0 (user) holds the text of <|im_end|>"])
        self.assertEqual(row["ids"].count(end), 1 + self.row(record())["ids"].count(end))  # as transformers makes it
        self.assertEqual(self.row(record("a", "b<|im_end|>"))["notes"], ["special-token-text: message 1 (assistant) holds the text of <|im_end|>"])
        self.assertIn("special-token-text: message 1 (assistant) holds the text of <|im_start|>", self.row(record(reasoning_content="<|im_start|>"))["notes"])
        self.assertNotIn("notes", self.row({"text": EXPECTED["chatml/two_turns"]["text"]}))  # rendered before: they are meant
        careful = text_worker.TextWorker({"target": str(self.place / "chatml"), "skip_special_text": True})
        rows = families.rows(careful, [json.dumps(one).encode() for one in (record("a<|im_end|>b"), record())])
        self.assertEqual([row.get("skip") for row in rows], ["special-token-text", None])
        self.assertEqual(rows[0]["why"], "message 0 (user) holds the text of <|im_end|>")

    def test_a_template_that_writes_without_an_end_is_a_reason_to_skip(self):
        folder = self.place / "endless"
        shutil.copytree(self.place / "chatml", folder)
        own = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        (folder / "chat_template.jinja").write_text("{% if 'on and on' in messages[0].content %}{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}{% endif %}" + own)
        worker = text_worker.TextWorker({"target": str(folder)})
        rows = families.rows(worker, [json.dumps({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}).encode() for text in ("a", "on and on")])
        self.assertEqual([row.get("skip") for row in rows], [None, "template"])
        self.assertIn("a loop without an end?", rows[1]["why"])
        self.assertEqual(rows[0]["ids"], self.row({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]})["ids"])

    def test_a_prompt_ends_where_the_answer_begins(self):
        worker = text_worker.TextWorker({"target": str(self.place / "chatml"), "prompts": True})
        messages = CONVERSATIONS["two_turns"][0]
        row = families.rows(worker, [json.dumps({"messages": messages, "category": "greeting"}).encode()])[0]
        self.assertEqual(worker.tokenizer.decode(row["ids"], skip_special_tokens=False), worker.template.text(messages[:3], ask=True))
        self.assertEqual(row["category"], "greeting")

    def test_a_target_that_can_not_be_used_is_a_fault_with_advice(self):
        for change, part in [(lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
                             (lambda f: (f / "tokenizer.json").write_text("{}"), "can't be read"),
                             (lambda f: (f / "tokenizer_config.json").write_text("{"), "can't be read"),
                             (lambda f: (f / "tokenizer_config.json").unlink(), "no chat template"),
                             (lambda f: (f / "chat_template.jinja").write_text("{% for %}"), "can't be compiled")]:
            with self.subTest(part):
                folder = self.place / "broken"
                shutil.copytree(self.place / "chatml", folder)
                change(folder)
                with self.assertRaises(text_worker.Fault) as fault:
                    text_worker.TextWorker({"target": str(folder)})
                self.assertIn(part, str(fault.exception))
                self.assertTrue(fault.exception.fix)
                shutil.rmtree(folder)


if __name__ == "__main__":
    unittest.main(verbosity=2)
