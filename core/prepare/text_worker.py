#!/usr/bin/env python3
"""The text side of `sf-host prepare`: chat records to token ids and the places of what the model says in them.

sf-host starts one such process for each worker, writes requests to its standard input, reads answers from its standard output and
kills it when it ends. Every line is JSON. The first one in says {"target": FOLDER, "template_path": "", "template_options": {},
"date": "", "max_length": 0, "ignored": [], "text_supervision": "answers", "prompts": false, "skip_special_text": false, "input_bytes": 0, "own_values": []};
the first one out is {"reading": "the chat template"}, when the tokenizer has been read, and then {"ready": {...}}; or {"error", "fix"}. Then

    {"op": "rows", "count": N}, and N raw lines of the user's file    N lines, {"ids": COUNT, ...} or {"skip": REASON, "why"}, each with COUNT
                                                                      32-bit integers behind it, little end first: most of what is said
    {"op": "texts", "ids": [[..], ..]}                                {"texts": [[the text of each token], ..]}

The rendering is the model's own chat template, called as Hugging Face's apply_chat_template calls it. Nobody's header strings are
matched: where an answer begins and ends is found by rendering (see Renderer.places). Errors of a record are its skip reason and never
end the process. A template that does not end is sf-host's to notice: it looks at the processor time of this process.
"""
import array
import datetime
import gc
import hashlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import signal
import sys
import unicodedata
from pathlib import Path

# Marks that are put around pieces of a conversation, to see where a template puts them. They are of a private plane of Unicode, which texts
# do not use; one that does is skipped with a reason.
FIRST_MARK = 0xF0000
OPEN_ANSWER, CLOSE_ANSWER = chr(0x100000), chr(0x100001)  # around what a template marks by {% generation %}
MARK = re.compile("[\U000F0000-\U0010FFFD]")
SPLIT = re.compile("([\U000F0000-\U0010FFFD])")

WORD_COUNT = 200000  # whose tokens tokenizers remembers; its own 10000 are soon full
PIECE_COUNT = 1000000  # that a template may write for one conversation: a turn is some ten

ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
         "bot": "assistant", "system": "system", "developer": "developer", "tool": "tool", "function": "tool", "observation": "tool",
         "ipython": "tool"}
REASONING = ("reasoning_content", "reasoning", "thinking")
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"what": "tide"}}}
PROBE_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks something up.", "parameters": {
    "type": "object", "properties": {"what": {"type": "string", "description": "what to look up"}}, "required": ["what"]}}}


class Fault(Exception):
    """The target's files can't be used: what is wrong, and what to do."""

    def __init__(self, what, fix):
        super().__init__(what)
        self.fix = fix


class Skip(Exception):
    """This record can't be used: the reason by which it is counted, and the particulars."""

    def __init__(self, reason, why=""):
        super().__init__(why)
        self.reason = reason


def whole_unicode(text: str) -> str:
    """The text with halves of surrogate pairs, which no UTF-8 can hold, spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_text(path: Path, fix: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Fault(f"{path} does not exist", fix) from None
    except (OSError, ValueError) as error:
        raise Fault(f"{path} can't be read: {error}", fix) from None


def read_json(path: Path, fix: str) -> dict:
    try:
        found = json.loads(read_text(path, fix))
    except (ValueError, RecursionError) as error:
        raise Fault(f"{path} can't be read: {error}", fix) from None
    if not isinstance(found, dict):
        raise Fault(f"{path} holds a {type(found).__name__}, an object expected", fix)
    return found


# ---- the record

def first_of(record: dict, *keys):
    """The first value that is there. Files with a column for every way of spelling have null in the others."""
    return next((record[key] for key in keys if record.get(key) is not None), None)


def text_of(content, where: str, is_tool=False) -> str:
    """A message's content as one text; parts of text are joined, anything else is refused. What a tool returned may be any JSON, as its text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, (str, dict)) for part in content):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif part.get("type", "text") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                raise Skip("not-text", f"{where} has a part of type {part.get('type')!r}")
        return "".join(texts)
    if is_tool:
        return json.dumps(content, ensure_ascii=False)
    raise Skip("bad-message", f"the content of {where} is {type(content).__name__}, a text expected")


def calls_of(message, where: str):
    """Tool calls with their arguments as objects, as templates expect them."""
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), dict):
        calls = [{"type": "function", "function": message["function_call"]}]
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError):
            raise Skip("bad-message", f"{where}: tool_calls is a text that is no JSON") from None
    if not calls:
        return None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Skip("bad-message", f"{where}: tool_calls is not a list of objects")
    result = []
    for call in calls:
        call = dict(call)
        if isinstance(call.get("function"), dict):
            function = call["function"] = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"])
                except (ValueError, RecursionError):
                    pass  # a template that prints it as it stands may take it
        result.append(call)
    return result


def called(message):
    """Names of the functions that a message calls."""
    functions = (call.get("function") for call in message["tool_calls"])
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def messages_of(listed, prompts=False) -> tuple:
    """Messages in the OpenAI spelling, and notes on what was mended; with `prompts` up to the last question. Raises Skip."""
    if not isinstance(listed, list):
        raise Skip("bad-message", f"messages is {type(listed).__name__}, a list expected")
    if not listed:
        raise Skip("empty", "there is no message")
    messages, notes = [], []
    for i, message in enumerate(listed):
        where = f"message {i}"
        if not isinstance(message, dict):
            raise Skip("bad-message", f"{where} is {type(message).__name__}, an object expected")
        name = first_of(message, "role", "from")
        role = ROLES.get(name.lower() if isinstance(name, str) else name if isinstance(name, (int, float)) else None)
        if role is None:
            raise Skip("unknown-role", f"{where} has the role {name!r}")
        content = first_of(message, "content", "value")
        kept = {"role": role, "content": content if isinstance(content, str) else text_of(content, where, role == "tool")}
        if len(message) == 2 and ("content" in message or "value" in message):
            messages.append(kept)
            continue
        calls = calls_of(message, where) if role == "assistant" else None
        if calls:
            kept["tool_calls"] = calls
        for key in REASONING:
            if role == "assistant" and isinstance(message.get(key), str) and message[key]:
                kept[key] = message[key]
        for key in ("name", "tool_call_id"):
            if isinstance(message.get(key), str):
                kept[key] = message[key]
        if role == "assistant" and message.get("finish_reason") == "length":
            kept["finish_reason"] = "length"
        messages.append(kept)

    head = [m for m in messages[:1] if m["role"] in ("system", "developer")]
    rest = messages[len(head):]
    first = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if first is None:
        raise Skip("no-question", "no message is the user's")
    if first > 0:
        notes.append("dropped-before-first-question")
    ordered = head
    for message in rest[first:]:
        before = ordered[-1]["role"] if ordered else ""
        if (message["role"] == "tool" and before not in ("assistant", "tool")) or (message["role"] == "assistant" and before not in ("user", "tool")):
            notes.append("cut-where-roles-break")
            break
        ordered.append(message)
    if prompts:
        while ordered[-1]["role"] == "assistant":
            ordered.pop()
        return ordered, notes
    if not any(m["role"] == "assistant" for m in ordered):
        raise Skip("no-answer", "no message is the assistant's")
    return ordered, notes


def parse_row(line: bytes):
    """A line's record. Raises Skip."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Skip("encoding", f"byte {error.start} is not UTF-8") from None
    try:
        record = json.loads(text.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise Skip("json", f"not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise Skip("json", f"{type(record).__name__} found, an object expected")
    return record


# ---- the template

def make_environment(date: str):
    """Jinja2 as Hugging Face's apply_chat_template sets it up: whitespace, loop controls, tojson, raise_exception, strftime_now."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationMarks(Extension):
        """{% generation %} ... {% endgeneration %} puts marks around what it wraps."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        @staticmethod
        def _marked(caller):
            return OPEN_ANSWER + caller() + CLOSE_ANSWER

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise TemplateError(message)

    class Environment(ImmutableSandboxedEnvironment):
        """What the sandbox says of an attribute depends on the object's type alone, and it takes longer to say it than a template to run."""

        def __init__(self, **options):
            super().__init__(**options)
            self.verdicts = {}

        def is_safe_attribute(self, obj, attr, value):
            key = type(obj), attr
            verdict = self.verdicts.get(key)
            if verdict is None:
                verdict = self.verdicts[key] = super().is_safe_attribute(obj, attr, value)
            return verdict

    day = datetime.datetime.strptime(date, "%Y-%m-%d") if date else datetime.datetime.now()
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = day.strftime
    return environment


def common_prefix(a: str, b: str) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


class Rendered:
    """A conversation as text. starts and ends: where each message's content begins and ends (by message; a template may hide some).
    trimmed: without the blanks around it."""

    def __init__(self, text, starts, ends, generated):
        self.text, self.starts, self.ends, self.generated, self.trimmed = text, starts, ends, generated, True


def unmark(marked: str) -> Rendered:
    pieces = SPLIT.split(marked)  # text, mark, text, mark, ... text
    starts, ends, generated, at, opened = {}, {}, [], 0, None
    for i in range(1, len(pieces), 2):
        at += len(pieces[i - 1])
        index, is_end = divmod(ord(pieces[i]) - FIRST_MARK, 2)
        if pieces[i] == OPEN_ANSWER:
            opened = at
        elif pieces[i] == CLOSE_ANSWER:
            if opened is not None:
                generated.append((opened, at))
            opened = None
        else:
            (ends if is_end else starts)[index] = at
    return Rendered("".join(pieces[::2]), starts, ends, generated)


class Answer:
    """What the model says at one place: characters [begin, end), of which [begin, reasoning_end) are reasoning."""

    def __init__(self, begin, end, reasoning_end):
        self.begin, self.end, self.reasoning_end = begin, end, max(begin, min(reasoning_end, end))


class Renderer:
    """A chat template with the special tokens of its tokenizer."""

    def __init__(self, source: str, special_tokens: dict, special_texts, end_texts, options=None, date=""):
        from jinja2.exceptions import TemplateError
        try:
            self.template = make_environment(date).from_string(source)
        except TemplateError as error:
            raise Fault(f"the chat template can't be compiled: {error} (line {getattr(error, 'lineno', '?')})",
                        "mend the template, or name another one with data.chat_template_path") from None
        self.source = source
        self.special_tokens = special_tokens
        self.options = options or {}
        self.has_marks = "endgeneration" in source
        self.reads_tools = re.search(r"\btools\b", source) is not None
        specials = sorted(set(special_texts) | set(end_texts), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, specials))) if specials else None
        self.end_texts = set(end_texts)
        self.tails, self.prompts_only = {}, {}
        self.closers, self.header, self.turns = set(end_texts), "", []
        self.learn()

    def render(self, messages, tools=None, options=None, ask=False) -> str:
        """The template's own text, with marks where it has them ({% generation %}) or the messages do."""
        values = {**self.special_tokens, **self.options, **(options or {})}
        pieces = self.template.generate(messages=messages, tools=tools, documents=None, add_generation_prompt=ask, **values)
        text = "".join(itertools.islice(pieces, PIECE_COUNT))
        if next(pieces, None) is not None:
            raise ValueError(f"it writes more than {PIECE_COUNT} pieces of text for one conversation: a loop without an end?")
        return text

    def text(self, messages, tools=None, options=None, ask=False) -> str:
        """What apply_chat_template(tokenize=False) returns."""
        text = self.render(messages, tools, options, ask)
        return MARK.sub("", text) if self.has_marks else text

    # -- what this template does, seen from small conversations

    def learn(self) -> None:
        """Finds the tokens that close an answer: what stands right after it when the conversation ends there; and an answer's header."""
        ask, say = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Say"}
        call = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}

        def first_special(text):
            found = self.special.search(text) if self.special else None
            return found.group() if found and not text[:found.start()].strip() else None

        last, middle = self.probe([ask, say]), self.probe([ask, say, ask, say])
        closers = set(self.end_texts)
        if last is not None and 1 in last.ends:
            closers.add(first_special(last.text[last.ends[1]:]))
        if middle is not None and 3 in middle.ends:
            closers.add(first_special(middle.text[middle.ends[3]:]))
        with_call = self.probe([ask, call], [PROBE_TOOL])
        if with_call is not None and 0 in with_call.ends and self.special:
            found = self.special.findall(with_call.text[with_call.ends[0]:])
            if found and with_call.text.rstrip().endswith(found[-1]):
                closers.add(found[-1])
        closers.discard(None)
        self.closers = closers
        self.closer = re.compile("|".join(map(re.escape, sorted(closers, key=len, reverse=True)))) if closers else None
        # What stands between an answer and the next question, and between a call and what the tool returned.
        self.turns = [middle.text[middle.ends[1]:middle.ends[2] - len(ask["content"])]] if middle is not None and 1 in middle.ends and 2 in middle.ends else []
        returned = self.probe([ask, call, {"role": "tool", "content": "Res", "name": "look_up", "tool_call_id": "call00001"}], [PROBE_TOOL])
        if with_call is not None and returned is not None and 2 in returned.ends:
            self.turns.append(returned.text[common_prefix(with_call.text, returned.text):returned.ends[2] - len("Res")])
        self.turns = [turn for turn in self.turns if turn.strip()]
        header = self.tail([ask], None, None, fresh=True) or ""
        header = header[:len(header) - max(map(len, self.prompt_only(None, None)), default=0)]
        found = self.closer.match(header) if self.closer else None
        self.header = header[found.end():].lstrip() if found else header.lstrip() if header.strip() else ""

    def probe(self, messages, tools=None):
        try:
            return unmark(self.render(self.marked(messages, False), tools))
        except Exception:  # a template may refuse this kind of conversation; that is its answer
            return None

    @staticmethod
    def marked(messages, with_begin: bool, trimmed=True, empty_tools=False):
        """The messages with marks around their contents; trimmed: inside the blanks at their ends, which a template may take away; empty_tools: also where a
        tool returned nothing."""
        result = []
        for k, message in enumerate(messages):
            content = message["content"]
            core = content.strip() if trimmed else content
            if core.strip():
                begin = content.index(core)
                marked = (chr(FIRST_MARK + 2 * k) if with_begin else "") + core + chr(FIRST_MARK + 2 * k + 1)
                message = {**message, "content": content[:begin] + marked + content[begin + len(core):]}
            elif empty_tools and message["role"] == "tool":
                message = {**message, "content": content + chr(FIRST_MARK + 2 * k + 1)}
            result.append(message)
        return result

    def tail(self, messages, tools, options, fresh=False, trimmed=True):
        """What stands between the last message's content and the model's first own token. None when the template hides that content."""
        key = (messages[-1]["role"], tools is not None, json.dumps(options, sort_keys=True) if options else "", trimmed)
        if fresh or key not in self.tails:
            try:
                asked = unmark(self.render(self.marked(messages, False, trimmed), tools, options, ask=True))
            except Exception:
                return None
            end = asked.ends.get(len(messages) - 1)
            if end is None:
                return None
            self.tails[key] = asked.text[end:]
        return self.tails[key]

    # -- where the answers are

    def rendered(self, messages, tools, options) -> Rendered:
        """The text and where each content stands in it, from a second rendering with marks. The marks must not change the text: a template
        that looks at how a content begins is tried with marks at the ends alone."""
        plain = self.render(messages, tools, options)
        if not plain.isascii() and MARK.search(plain.replace(OPEN_ANSWER, "").replace(CLOSE_ANSWER, "") if self.has_marks else plain):
            raise Skip("private-characters", "there are characters of Unicode's private planes in it")
        whole = unmark(plain) if self.has_marks else Rendered(plain, {}, {}, [])
        if whole.generated:
            return whole
        has_blanks = any(m["content"] != m["content"].strip() for m in messages)
        ways = [(with_begin, trimmed, False) for with_begin, trimmed in ((True, not has_blanks), (True, True), (False, True))[0 if has_blanks else 1:]]
        if any(m["role"] == "tool" and not m["content"].strip() for m in messages):
            ways = [(with_begin, trimmed, True) for with_begin, trimmed, _ in ways] + ways
        for with_begin, trimmed, empty_tools in ways:
            try:
                found = unmark(self.render(self.marked(messages, with_begin, trimmed, empty_tools), tools, options))
            except Exception:
                continue
            if found.text == whole.text:
                found.trimmed = trimmed
                return found
        return whole  # places() then goes by prefixes alone

    def places(self, messages, tools=None, options=None):
        """The rendered text, what the model says in it, where the messages' contents are: (text, [Answer], [(role, begin, end)], notes).

        An answer begins where the generation prompt for it ends, and ends with the token that closes it. The prompt of answer i is what the
        template writes after messages 0..i-1 when asked for one; the part of it that follows message i-1's content is looked for behind that
        content in the whole text. It may be there in part: a template that opens a think block for the model writes none into history.
        """
        page = self.rendered(messages, tools, options)
        text = page.text
        roles = [(m["role"], page.starts[k], page.ends[k]) for k, m in enumerate(messages) if k in page.starts and k in page.ends]
        answers, notes = [], []
        if page.generated:
            said = [m for m in messages if m["role"] == "assistant"]
            for k, (begin, end) in enumerate(page.generated):
                if len(said) == len(page.generated) and self.lacks_calls(said[k], text[begin:end]):
                    notes.append("tool-calls-not-in-template")
                else:
                    answers.append(Answer(begin, end, self.reasoning_end(text, begin, end, None)))
            return text, answers, roles, notes
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = self.begin_of(page, messages, i, tools, options)
                end = self.end_of(page, messages, i, begin, tools, options)
                if self.lacks_calls(message, text[begin:end]):
                    notes.append("tool-calls-not-in-template")
                    continue
                shown = any(key in message and message[key].strip()[:80] in text[begin:end] for key in REASONING)
                thought = self.reasoning_end(text, begin, end, page.starts.get(i) if shown else None)
                answers.append(Answer(begin, end, thought))
        return text, answers, roles, notes

    @staticmethod
    def lacks_calls(message, said: str) -> bool:
        """True when the template leaves out what the message calls: an empty turn is not what the model said."""
        return bool(message.get("tool_calls")) and not all(name in said for name in called(message))

    def begin_of(self, page, messages, i, tools, options) -> int:
        before = page.ends.get(i - 1) if i > 0 else None
        limit = page.starts.get(i)
        if before is not None:
            for fresh in (False, True):
                tail = self.tail(messages[:i], tools, options, fresh, page.trimmed)
                if tail is None:
                    break
                matched = common_prefix(tail, page.text[before:before + len(tail)])
                if matched == len(tail):
                    return before + matched
                needed = [len(tail) - len(only) for only in self.prompt_only(tools, options) if tail.endswith(only)]
                needed = max((n for n in needed if matched >= n), default=-1)
                if needed >= 0:
                    return before + needed if limit is None else min(before + needed, limit)
            if limit is not None and self.header and page.text.count(self.header, before, limit) == 1:
                return page.text.index(self.header, before, limit) + len(self.header)
        try:
            prompt = self.text(messages[:i], tools, options, ask=True)
        except Exception:
            prompt = None
        if prompt is not None and page.text.startswith(prompt):
            return len(prompt)
        raise Skip("mask", f"the generation prompt of message {i} is not in the rendered conversation")

    def prompt_only(self, tools, options) -> list:
        """Ends of a generation prompt that are not in history: "<think>\n" where a template opens that block for the model, and writes
        none for answers of earlier turns, or none at all."""
        key = (tools is not None, json.dumps(options, sort_keys=True) if options else "")
        if key not in self.prompts_only:
            ask, say = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Say"}
            tail, found = self.tail([ask], tools, options, fresh=True), []
            for talk in ([ask, say], [ask, say, ask, say]):
                try:
                    said = unmark(self.render(self.marked(talk, True), tools, options))
                except Exception:
                    continue
                if not tail or 0 not in said.ends or 1 not in said.starts:
                    continue
                gap = said.text[said.ends[0]:said.starts[1]]
                shared = common_prefix(tail, gap)
                opened = tail.rfind("<", 0, shared)
                if shared < len(tail) and opened > tail.rfind(">", 0, shared):
                    shared = opened  # "</think>" and "<think>" begin alike
                if 0 < shared < len(tail):
                    found.append(tail[shared:])
            self.prompts_only[key] = found
        return self.prompts_only[key]

    def end_of(self, page, messages, i, begin, tools, options) -> int:
        text, message = page.text, messages[i]
        content_end = page.ends.get(i)
        later = [place for k in range(i + 1, len(messages)) for place in (page.starts.get(k, page.ends.get(k)),) if place is not None]
        limit = min(later) if later else len(text)
        if message.get("finish_reason") == "length" and content_end is not None and not message.get("tool_calls"):
            return content_end  # it was cut there, the model never closed it
        if self.closer is not None:
            found = list(self.closer.finditer(text, max(begin, content_end or 0), limit))
            if message.get("tool_calls"):
                # Each call may be closed by itself. Where the next message stands is then the end; without it the closers of later turns would count.
                is_known = i + 1 == len(messages) or i + 1 in page.starts or i + 1 in page.ends
                if found and (is_known or len(found) == 1):
                    return found[-1].end()
            elif content_end is None:  # without a word; a template that does not close it has the next turn there
                turn = self.next_turn(text, begin, found[0].start() if found else limit)
                if turn is not None or found:
                    return found[0].end() if turn is None else turn
            elif found and not text[content_end:found[0].start()].strip():
                return found[0].end()
        if content_end is not None and not message.get("tool_calls"):
            return content_end  # this template closes answers with nothing of the model's
        try:
            until_here = self.text(messages[:i + 1], tools, options)
        except Exception:
            until_here = None
        if until_here is not None and text.startswith(until_here) and len(until_here) >= begin:
            return len(until_here.rstrip("\n"))
        raise Skip("mask", f"the end of message {i} is not to be found in the rendered conversation")

    @staticmethod
    def reasoning_end(text, begin, end, content_begin) -> int:
        if content_begin is not None and content_begin > begin:
            return content_begin
        close = text.find("</think>", begin, end)
        if close < 0:
            return begin
        close += len("</think>")
        while close < end and text[close] in "\n ":
            close += 1
        return close

    def next_turn(self, text, begin, end):
        """Where the first question or result of a tool begins in text[begin:end]; None when there is none."""
        return min((place for place in (text.find(turn, begin, end) for turn in self.turns) if place >= 0), default=None)

    def answers_in_text(self, text: str):
        """Answers of a text that was rendered before: behind each header of an answer, up to what closes it, or to the next turn where a template closes
        only the last answer."""
        if not self.header:
            raise Skip("mask", "the template has no header of answers that could be found in a text")
        answers, at = [], text.find(self.header)
        while at >= 0:
            begin = at + len(self.header)
            following = text.find(self.header, begin)
            limit = following if following >= 0 else len(text)
            found = self.closer.search(text, begin, limit) if self.closer else None
            turn = self.next_turn(text, begin, found.start() if found else limit)
            end = turn if turn is not None else found.end() if found else limit
            answers.append(Answer(begin, end, self.reasoning_end(text, begin, end, None)))
            at = following
        return answers


# ---- tokens

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2_SPLIT = CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_SPLIT = CONTRACTIONS + r"| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
OTHER_BLANK = "\u180e"  # a blank to fastokens and none to tokenizers, the only character that they class differently (with_transformers.py tries all)
CHECKED_EVERY = 100  # rows: one of so many is encoded by both libraries
FAST_FROM = 40  # bytes of input for each token of the vocabulary; for less the faster library is left out: loading it takes longer than it saves


def kinds(part):
    """The normalizers, splits or processors that a part of tokenizer.json is made of."""
    if part and part["type"] == "Sequence":
        for one in part.get("pretokenizers") or part.get("normalizers") or part.get("processors") or []:
            yield from kinds(one)
    elif part:
        yield part


def is_bytewise(description: dict) -> bool:
    """True when tokens are the text's bytes, cut somewhere: their places follow from their lengths."""
    model, splits = description["model"], list(kinds(description.get("pre_tokenizer")))
    return (model.get("type") == "BPE" and not model.get("dropout") and not model.get("byte_fallback")
            and not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
            and all(part["type"] == "NFC" for part in kinds(description.get("normalizer")))
            and any(part["type"] == "ByteLevel" for part in splits)
            and all(part["type"] in ("Digits", "Split", "ByteLevel", "Punctuation") and not part.get("add_prefix_space") for part in splits)
            and all(part["type"] in ("TemplateProcessing", "ByteLevel") and not part.get("add_prefix_space") for part in kinds(description.get("post_processor"))))


def with_one_split(description: dict) -> dict:
    """The same tokenizer, its split spelled as one expression: fastokens has faster code for it than for the parts."""
    splits = [{key: value for key, value in part.items() if key != "trim_offsets"} for part in kinds(description.get("pre_tokenizer"))]
    whole = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    expression = {1: GPT2_SPLIT, 2: DIGITS_SPLIT}.get(len(splits)) if splits[-1] == whole and splits[:-1] in ([], [{"type": "Digits", "individual_digits": True}]) else None
    if expression is None:
        return description
    return {**description, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}}


def probe_texts(added):
    """Texts of every kind that splits tell apart, with the added tokens among them: what two tokenizers must agree on before one stands for the other."""
    draw = random.Random(20260131)
    letters = list("aZétslremdv  \n\t\r'’.,(-_5 9\u00a0\u3000日本語é́🙂ßжДعकก한½²\\`/\u200b\u200d\u0301\x1c\x85") + [
        "'s", "'LL", " '", " \n", "\n\n", "  ", "   ", "the", " of", "ing", "->", "://", "2026", "Straße", "();\n", "\r\n", "HttpServer", " naïve", "👩‍👩‍👧"]
    yield from ("", " ", "a", "\n", "The tide's at 12:30, isn't it?  We'LL see.\n\n    def f(x):\n\treturn {'a': x[0] + 1234567}\n", "x" * 300, "é" * 100, " " * 200 + "a")
    for _ in range(200):
        yield "".join(draw.choice(letters) for _ in range(draw.randint(1, 60)))
    for first in range(0, len(added), 8):
        some = added[first:first + 8]
        yield "".join(one + draw.choice(["", "", " ", "\n", "a", " b", "日"]) for one in some)
        yield "".join(draw.choice(letters) + one + draw.choice(letters) for one in some)


class Places:
    """Where the tokens of a text stand. ids: their numbers, 32-bit integers in an array; at(place): the first token that reaches beyond it;
    starts_before(token, place)."""

    def inside(self, begin: int, end: int):
        """Tokens wholly inside [begin, end): one that reaches over a border is not what the model would say there."""
        first, last = self.at(begin), self.at(end)
        if first < len(self.ids) and self.starts_before(first, begin):
            first += 1
        return first, max(first, last)

    def touching(self, begin: int, end: int):
        first, last = self.at(begin), self.at(end)
        if last < len(self.ids) and self.starts_before(last, end):
            last += 1
        return first, max(first, last)


class Encoded(Places):
    """As tokenizers says it."""

    def __init__(self, encoding, length):
        self.encoding, self.ids, self.length = encoding, array.array("i", encoding.ids), length

    def at(self, place: int) -> int:
        while place < self.length:
            token = self.encoding.char_to_token(place)
            if token is not None:
                return token
            place += 1  # some tokenizers leave blanks out of their offsets
        return len(self.ids)

    def starts_before(self, token: int, place: int) -> bool:
        return self.encoding.token_to_chars(token)[0] < place

    @property
    def offsets(self):
        return self.encoding.offsets


class Bytewise(Places):
    """As the lengths of the tokens say it. ends: of the tokens, in bytes; blanks: (before, behind) by id where a token's offsets leave its blanks out."""

    def __init__(self, text, size, ids, ends, blanks):
        self.text, self.size, self.ids, self.ends, self.blanks = text, size, ids, ends, blanks
        self.is_ascii = size == len(text)
        self.known = (0, 0)  # a character, and the bytes before it

    def bytes_before(self, place: int) -> int:
        if self.is_ascii:
            return place
        character, byte = self.known if self.known[0] <= place else (0, 0)
        byte += len(self.text[character:place].encode())
        self.known = place, byte
        return byte

    def bounds(self, token: int):
        begin, end = int(self.ends[token - 1]) if token else 0, int(self.ends[token])
        if self.blanks is None:
            return begin, end
        before, behind = (int(one[self.ids[token]]) for one in self.blanks)
        begin = min(begin + before, end)
        return begin, max(end - behind, begin)

    def at(self, place: int) -> int:
        while place < len(self.text):
            byte = self.bytes_before(place)
            token = int(self.ends.searchsorted(byte, "right"))
            if self.blanks is None:
                return token
            begin, end = self.bounds(token)
            if begin <= byte < end:
                return token
            place += 1
        return len(self.ids)

    def starts_before(self, token: int, place: int) -> bool:
        return self.bounds(token)[0] < self.bytes_before(place)

    @property
    def offsets(self):
        character = [k for k, one in enumerate(self.text) for _ in one.encode()]
        found = []
        for token in range(len(self.ids)):
            begin, end = int(self.ends[token - 1]) if token else 0, int(self.ends[token])
            before, behind = (0, 0) if self.blanks is None else (int(one[self.ids[token]]) for one in self.blanks)
            first, last = character[begin], character[end - 1] + 1
            first = min(first + before, last)
            found.append((first, max(last - behind, first)))
        return found


class FastEncoder:
    """fastokens in the place of tokenizers, for byte-level BPE: the same ids, several times faster, without places, which Bytewise finds. Made only when both
    agree on probe_texts(), ids and offsets; raises ValueError with what speaks against it."""

    def __init__(self, tokenizer, description: dict):
        if not is_bytewise(description):
            raise ValueError("not byte-level BPE")
        try:
            import fastokens
            import numpy
            from fastokens._native import Tokenizer
        except ImportError as error:
            raise ValueError(str(error)) from None
        self.numpy, self.tokenizer = numpy, tokenizer
        self.name = f"fastokens {importlib.metadata.version(fastokens.__name__)}"
        self.is_nfc = any(True for _ in kinds(description.get("normalizer")))
        try:
            self.fast = Tokenizer.from_json_str(json.dumps(with_one_split(description)))
        except Exception as error:
            raise ValueError(f"{self.name} can't read it: {error}") from None
        added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self.measure(added)
        is_trimmed = tokenizer.encode("a a", add_special_tokens=False).offsets[-1][0] == 2
        self.blanks = self.blanks if is_trimmed else None
        for text in probe_texts(list(added.values())):
            if self.differs(text, self.encode([text])[0]):
                raise ValueError(f"{self.name} has other tokens for {text[:60]!r}")

    def measure(self, added: dict) -> None:
        """The bytes of each token, and the blanks at its ends."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        alphabet = {chr(byte) for byte in printable} | {chr(256 + k) for k in range(256 - len(printable))}
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        size = 1 + max([*vocabulary.values(), *added], default=0)
        lengths, before, behind = (self.numpy.zeros(size, self.numpy.int64) for _ in range(3))
        for token, number in vocabulary.items():
            if alphabet.issuperset(token):  # else it is of no length, and texts with it are left to tokenizers
                lengths[number] = len(token)
                if token[0] == "Ġ" or token[-1] == "Ġ":
                    before[number], behind[number] = len(token) - len(token.lstrip("Ġ")), len(token) - len(token.rstrip("Ġ"))
        for number, text in added.items():
            lengths[number] = len(text.encode())
            before[number], behind[number] = (len(text.encode()) - len(one.encode()) for one in (text.lstrip(), text.rstrip()))
        self.lengths, self.blanks = lengths, (before, behind)

    def encode(self, texts):
        """Bytewise of each text, None where tokenizers has to be asked: the tokens are not the text's bytes, or some byte has no token."""
        try:
            flat, places = self.fast.encode_batch_flat(texts)
        except Exception:
            return [None] if len(texts) == 1 else [self.encode([text])[0] for text in texts]
        ids = self.numpy.frombuffer(flat, self.numpy.int32)
        places = self.numpy.frombuffer(places, self.numpy.uint64).tolist()
        ends = self.lengths[ids].cumsum()
        found = []
        for text, first, last in zip(texts, places, places[1:]):
            is_ascii = text.isascii()
            size = len(text) if is_ascii else len(text.encode())
            start = int(ends[first - 1]) if first else 0
            is_whole = (int(ends[last - 1]) if last else 0) - start == size and (
                is_ascii or (OTHER_BLANK not in text and not (self.is_nfc and not unicodedata.is_normalized("NFC", text))))
            found.append(Bytewise(text, size, ids[first:last], ends[first:last] - start if start else ends[first:last], self.blanks) if is_whole else None)
        return found

    def differs(self, text, found) -> bool:
        if found is None:
            return False
        whole = self.tokenizer.encode(text, add_special_tokens=False)
        return found.ids.tolist() != whole.ids or found.offsets != whole.offsets


def special_texts_of(config: dict, fallback: dict) -> dict:
    """bos_token and the like, as templates read them."""
    result = {}
    for key in SPECIAL_KEYS:
        value = config.get(key, fallback.get(key))
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            result[key] = value
    extra = config.get("additional_special_tokens", fallback.get("additional_special_tokens"))
    if isinstance(extra, list) and extra:
        result["additional_special_tokens"] = [t["content"] if isinstance(t, dict) else t for t in extra]
    named = config.get("extra_special_tokens")
    if isinstance(named, dict):
        result.update({key: value["content"] if isinstance(value, dict) else value for key, value in named.items()})
    return result


def template_sources(folder: Path, config: dict) -> dict:
    """The templates of a target by name: chat_template.jinja before tokenizer_config.json, as Hugging Face reads them."""
    found = config.get("chat_template")
    sources = {}
    if isinstance(found, str):
        sources["default"] = found
    elif isinstance(found, list):
        sources.update({entry.get("name", "?"): entry.get("template") for entry in found if isinstance(entry, dict)})
    elif isinstance(found, dict):
        sources.update(found)
    elif found is not None:
        sources["default"] = found
    fix = "fetch the target's file again, or name a template with data.chat_template_path"
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = read_text(folder / "chat_template.jinja", fix)
    elif not sources and (folder / "chat_template.json").is_file():
        sources["default"] = read_json(folder / "chat_template.json", fix).get("chat_template")
    more = folder / "additional_chat_templates"
    if more.is_dir():
        sources.update({path.stem: read_text(path, fix) for path in sorted(more.glob("*.jinja"))})
    for name, source in sources.items():
        if not isinstance(name, str) or not isinstance(source, str) or not source.strip():
            raise Fault(f"the chat template {name!r} of {folder} is {'empty' if isinstance(source, str) else type(source).__name__}, a Jinja text expected", fix)
    return sources


class TextWorker:
    """Tokenizer and templates of a target folder."""

    def __init__(self, settings: dict, tell=lambda what: None):
        from tokenizers import Tokenizer
        folder = Path(settings["target"])
        self.max_length = settings.get("max_length") or 0
        self.ignored = [text for text in settings.get("ignored") or [] if text]
        self.whole_texts = settings.get("text_supervision") == "all"
        self.prompts = bool(settings.get("prompts"))
        self.skip_special_text = bool(settings.get("skip_special_text"))
        self.own_values = frozenset(settings.get("own_values", ()))  # of a template: what a record says, or prepare
        try:
            datetime.datetime.strptime(settings.get("date") or "2026-01-31", "%Y-%m-%d")
        except ValueError:
            raise Fault(f"data.chat_template_date is {settings['date']!r}, which is no day", "write it as 2026-01-31") from None
        path = folder / "tokenizer.json"
        if not path.is_file():
            there = "it has tokenizer.model, which only the slow tokenizers read; " if (folder / "tokenizer.model").is_file() else ""
            raise Fault(f"{path} does not exist", there + "fetch the target's tokenizer.json and tokenizer_config.json, or bring token "
                        "records (JSONL with input_ids and loss_mask) and leave prepare out")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise Fault(f"{path} can't be read: {error}", "fetch the target's tokenizer.json again") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        resize = getattr(self.tokenizer.model, "_resize_cache", None)
        if resize is not None:
            resize(WORD_COUNT)
        fix = "fetch the target's tokenizer_config.json"
        config = read_json(folder / "tokenizer_config.json", fix) if (folder / "tokenizer_config.json").is_file() else {}
        fallback = read_json(folder / "special_tokens_map.json", fix) if (folder / "special_tokens_map.json").is_file() else {}
        self.add_listed_tokens(config)
        self.fast, self.encoded = None, 0
        self.encoder = f"tokenizers {importlib.metadata.version('tokenizers')}"
        wanted, size = os.environ.get("SF_FAST_TOKENIZER", ""), settings.get("input_bytes")
        if wanted == "0":
            self.encoder += " (SF_FAST_TOKENIZER = 0)"
        elif wanted != "1" and size is not None and size < FAST_FROM * self.tokenizer.get_vocab_size(with_added_tokens=True):
            self.encoder += f" (less than {FAST_FROM} bytes of input for each token of the vocabulary)"
        else:
            try:
                self.fast = FastEncoder(self.tokenizer, json.loads(self.tokenizer.to_str()))
                self.encoder = f"{self.fast.name}, checked by {self.encoder}"
            except ValueError as reason:
                self.encoder += f" ({reason})"
        special_tokens = special_texts_of(config, fallback)
        specials = {token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special}
        ends = self.end_texts(folder, special_tokens)
        self.special = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True)))) if specials else None

        sources = template_sources(folder, config)
        if settings.get("template_path"):
            chosen = Path(settings["template_path"])
            if not chosen.is_file():
                raise Fault(f"the chat template {chosen} does not exist", "correct data.chat_template_path")
            sources = {"default": read_text(chosen, "correct data.chat_template_path: a Jinja text in UTF-8")}
        if not sources and not self.whole_texts:
            raise Fault(f"{folder} has no chat template (tokenizer_config.json, chat_template.jinja)",
                        "name one with data.chat_template_path; for texts without turns set data.text_supervision = \"all\"")
        tell("the chat template")
        self.templates = {name: Renderer(source, special_tokens, specials, ends, settings.get("template_options"), settings.get("date") or "")
                          for name, source in sources.items()}
        self.template = self.templates.get("default") or next(iter(self.templates.values()), None)
        self.facts = {
            "tokens": self.tokenizer.get_vocab_size(with_added_tokens=True),
            "largest_id": max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
            "tokenizer_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "template_sha256": hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest(),
            "generation_marks": bool(self.template and self.template.has_marks),
            "closers": sorted(self.template.closers) if self.template else [],
            "header": self.template.header if self.template else "",
            "encoder": self.encoder,
            "reads_date": any("strftime_now" in source for source in sources.values()),
        }

    def add_listed_tokens(self, config: dict) -> None:
        """Tokens that tokenizer_config.json lists and tokenizer.json lacks, as Hugging Face adds them."""
        from tokenizers import AddedToken
        listed = config.get("added_tokens_decoder")
        if not isinstance(listed, dict):
            return
        known = self.tokenizer.get_added_tokens_decoder()
        missing = [entry for number, entry in sorted(listed.items(), key=lambda item: int(item[0])) if int(number) not in known and isinstance(entry, dict)]
        for entry in missing:
            self.tokenizer.add_tokens([AddedToken(**{key: entry[key] for key in (
                "content", "single_word", "lstrip", "rstrip", "normalized", "special") if key in entry})])

    def end_texts(self, folder: Path, special_tokens: dict):
        """The tokens at which generation stops: eos_token, and what generation_config.json and config.json name."""
        texts = {special_tokens["eos_token"]} if "eos_token" in special_tokens else set()
        for name in ("generation_config.json", "config.json"):
            if (folder / name).is_file():
                ids = read_json(folder / name, f"fetch {name} again").get("eos_token_id")
                for number in ids if isinstance(ids, list) else [ids]:
                    text = self.tokenizer.id_to_token(number) if isinstance(number, int) else None
                    if text:
                        texts.add(text)
        return texts

    def text_and_places(self, record: dict):
        """(text, answers, roles, notes) of a record. Raises Skip."""
        listed = first_of(record, "messages", "conversations", "conversation")
        if listed is None:
            if not isinstance(record.get("text"), str):
                raise Skip("no-conversation", "there is no messages, conversations or text; keys: " + ", ".join(map(str, list(record)[:8])))
            text = record["text"]
            if not text.strip():
                raise Skip("empty", "the text is empty")
            if self.whole_texts or self.prompts:
                return text, [Answer(0, len(text), 0)], [], []
            answers = self.template.answers_in_text(text)
            if not answers:
                raise Skip("no-answer", f"the text has no {self.template.header!r}")
            return text, answers, [], []
        if self.template is None:
            raise Skip("template", "the target has no chat template")
        messages, notes = messages_of(listed, self.prompts)
        if record.get("finish_reason") == "length" and not self.prompts:
            next(m for m in reversed(messages) if m["role"] == "assistant")["finish_reason"] = "length"
        tools = record.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError):
                raise Skip("bad-tools", "tools is a text that is no JSON") from None
        if tools is not None and not isinstance(tools, list):
            raise Skip("bad-tools", f"tools is {type(tools).__name__}, a list expected")
        template = self.templates.get("tool_use", self.template) if tools else self.template
        for message in messages:
            for key in REASONING:
                if key in message:
                    known = [name for name in REASONING if re.search(rf"\b{name}\b", template.source)]
                    if key not in known and known:
                        message[known[0]] = message.pop(key)
                    elif not known:
                        notes.append("reasoning-not-in-template")
                    break
        if tools and not template.reads_tools:
            notes.append("tools-not-in-template")
        options = record.get("chat_template_kwargs")
        if options is not None and not isinstance(options, dict):
            raise Skip("bad-options", f"chat_template_kwargs is {type(options).__name__}, an object expected")
        if options and not self.own_values.isdisjoint(options):
            raise Skip("bad-options", f"chat_template_kwargs sets {', '.join(sorted(self.own_values.intersection(options)))}, which is prepare's to say")
        special = self.special_text(messages)
        if special and self.skip_special_text:
            raise Skip("special-token-text", special)
        notes += [f"special-token-text: {special}"] if special else []
        try:
            if self.prompts:
                return template.text(messages, tools or None, options, ask=True), [], [], notes
            text, answers, roles, seen = template.places(messages, tools or None, options)
        except Skip:
            raise
        except Exception as error:
            raise Skip("template", f"the template says: {error}") from None
        if not answers:
            raise Skip("no-answer", "the template shows nothing of the assistant's messages")
        return text, answers, roles, notes + seen

    def special_text(self, messages) -> str:
        """The first message that holds the text of a special token, which becomes that token; "" when there is none."""
        for i, message in enumerate(messages if self.special else ()):
            for text in (message["content"], *(message.get(key, "") for key in REASONING)):
                found = self.special.search(text)
                if found:
                    return f"message {i} ({message['role']}) holds the text of {found.group()}"
        return ""

    def row(self, record: dict, places, encoding) -> dict:
        text, answers, roles, notes = places
        offsets, ids = encoding, encoding.ids
        result = {"tokens": len(ids), "ids": ids[:self.max_length] if self.max_length else ids, "answers": [], "roles": []}
        for key in ("id", "category"):
            name = record.get(key)
            if name is not None:
                result[key] = whole_unicode(name) if isinstance(name, str) else json.dumps(name)
        for answer in answers:
            first, last = offsets.inside(answer.begin, answer.end)
            reasoning = offsets.at(answer.reasoning_end) if answer.reasoning_end > answer.begin else first
            result["answers"].append([first, last, max(first, min(reasoning, last))])
        for role, begin, end in roles:
            result["roles"].append([role, *offsets.inside(begin, end)])
        for ignored in self.ignored:
            at = text.find(ignored)
            while at >= 0:
                result.setdefault("ignored", []).append(list(offsets.touching(at, at + len(ignored))))
                at = text.find(ignored, at + len(ignored))
        if notes:
            result["notes"] = list(dict.fromkeys(notes))
        return result

    def encode_all(self, texts) -> list:
        """Tokens and places of each text, as the tokenizer encodes it; a Skip where it raises."""
        found = self.fast.encode(texts) if self.fast and texts else [None] * len(texts)
        for k, text in enumerate(texts):
            if found[k] is None:
                try:
                    found[k] = Encoded(self.tokenizer.encode(text, add_special_tokens=False), len(text))
                except Exception as error:  # it has no token for something unknown, for one
                    found[k] = Skip("encoding", f"the tokenizer says: {error}")
            elif self.encoded % CHECKED_EVERY == 0 and self.fast.differs(text, found[k]):
                raise Fault(f"{self.encoder}, which gives other tokens for a text that begins with {text[:60]!r}",
                            "SF_FAST_TOKENIZER=0 leaves the faster library out; please report the text and the tokenizer")
            self.encoded += 1
        return found

    def encode(self, text: str):
        found = self.encode_all([text])[0]
        if isinstance(found, Skip):
            raise found
        return found

    def rows(self, lines):
        """One result for each line, in order."""
        results, texts = [], []
        for line in lines:
            try:
                record = parse_row(line)
                places = self.text_and_places(record)
                try:
                    places[0].isascii() or places[0].encode()
                except UnicodeEncodeError as error:  # half a surrogate pair is no text
                    raise Skip("encoding", f"the text is not Unicode: {error}") from None
                results.append((record, places))
                texts.append(places[0])
            except Skip as skip:
                results.append(skip)
        encoded = iter(self.encode_all(texts))
        for k, one in enumerate(results):
            if not isinstance(one, Skip):
                found = next(encoded)
                one = results[k] = found if isinstance(found, Skip) else self.row(*one, found)
            if isinstance(one, Skip):
                results[k] = {"skip": one.reason, "why": whole_unicode(str(one)[:300])}
        return results

    def texts(self, lists):
        return [[self.tokenizer.decode([number], skip_special_tokens=False) for number in ids] for ids in lists]


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sf-host's to handle
    source, out = sys.stdin.buffer, sys.stdout.buffer

    def spelled(answer) -> bytes:
        return json.dumps(answer, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"

    def spelled_row(row) -> bytes:
        if "ids" not in row:
            return spelled(row)
        ids = row["ids"]
        row["ids"] = len(ids)
        return spelled(row) + ids.tobytes()

    def say(answer):
        out.write(spelled(answer))
        out.flush()

    settings = json.loads(source.readline() or b"{}")
    for folder in settings.get("packages", []):
        sys.path.insert(0, folder)
    try:
        import jinja2, tokenizers  # noqa: E401, F401
    except ImportError as error:
        say({"error": f"{sys.executable} can't import what prepare needs: {error}",
             "fix": "run tools/setup, or pip install tokenizers jinja2 for this python3; or bring token records (JSONL with input_ids and loss_mask), which need no Python"})
        return 1
    try:
        worker = TextWorker(settings, lambda what: say({"reading": what}))
    except Fault as fault:
        say({"error": str(fault), "fix": fault.fix})
        return 1
    except Exception as error:  # files that nobody foresaw
        say({"error": f"the tokenizer's files in {settings['target']} can't be used: {type(error).__name__}: {error}", "fix": "fetch tokenizer.json, tokenizer_config.json and generation_config.json again"})
        return 1
    say({"ready": worker.facts})
    gc.freeze()
    gc.disable()  # it would look at every token list again and again
    answered = 0
    while header := source.readline():
        answered += 1
        if answered % 16 == 0:
            gc.collect()
        request = json.loads(header)
        if request["op"] == "rows":
            try:
                rows = worker.rows([source.readline().rstrip(b"\r\n") for _ in range(request["count"])])
            except Fault as fault:
                say({"error": str(fault), "fix": fault.fix})
                return 1
            out.writelines(map(spelled_row, rows))
            out.flush()
        elif request["op"] == "texts":
            say({"texts": worker.texts(request["ids"])})
        else:
            say({"error": f"unknown request {request['op']!r}", "fix": ""})
    return 0


if __name__ == "__main__":
    sys.exit(main())
