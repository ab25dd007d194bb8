#!/usr/bin/env python3
"""sf-plugin-check over plugins that are wrong: a crash, a hang, a lie is a result with a sentence, and the others go on.

    tests/sdk/checker.py BUILD_DIR TESTS_DIR [CASE ...]
"""
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

BUILD, TESTS = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
sys.path.insert(0, str(TESTS / "e2e"))

import tiny  # noqa: E402
from tiny import expect  # noqa: E402

GOOD, BAD, HOST = BUILD / "tests/plugins/good", BUILD / "tests/plugins/bad", BUILD / "tests/plugins/host"


def check(plugin, *arguments, code=0):
    done = subprocess.run([BUILD / "bin/sf-plugin-check", plugin, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, f"exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done


def results(plugin, *arguments, code):
    told = json.loads(check(plugin, *arguments, "--json", code=code).stdout)
    return told, {one["id"]: one for one in told["checks"]}


def a_good_tracker_passes_and_the_last_line_counts():
    done = check(GOOD / "fake_canary.so")
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed, 0 failed, 0 skipped", last), done.stdout
    assert int(last.split()[0]) > 20, last


def a_crash_is_a_failed_check_and_the_others_go_on():
    told, found = results(GOOD / "fake_ok.so", code=1)   # its writer is a text where functions should be
    expect(found["checkpoint/steps"]["text"], "the process ended by signal")
    assert found["checkpoint/steps"]["result"] == "failed" and found["life/whole"]["result"] == "passed", found
    expect(found["life/options"]["text"], "plugin.fake_ok.unread")
    assert told["failed"] >= 1 and told["passed"] + told["failed"] + told["skipped"] == len(told["checks"])


def a_hang_is_a_failed_check_within_its_limit():
    start = time.time()
    _, found = results(GOOD / "fake_ok.so", "--set", "plugin.fake_ok.fail_in=hang", "--limit", "1", "--only", "life/create", code=1)
    expect(found["life/create"]["text"], "did not end within 1 s")
    assert time.time() - start < 10


def what_is_thrown_is_told():
    _, found = results(GOOD / "fake_ok.so", "--set", "plugin.fake_ok.fail_in=start", "--only", "life/*", code=1)
    expect(found["life/whole"]["text"], 'plugin "fake_ok" failed in start: told to fail in start')
    assert found["life/create"]["result"] == "passed" and found["life/stop"]["result"] == "passed"
    _, found = results(GOOD / "fake_ok.so", "--set", "plugin.fake_ok.fail_in=interface", "--only", "life/interface", code=1)
    expect(found["life/interface"]["text"], 'offers no "sf.checkpoint-writer/1"')


def a_file_that_the_host_refuses_is_not_opened():
    for file, id, text in ((BAD / "fake_no_note.so", "static/note", "no sf-plugin note"), (BAD / "fake_own_nccl.so", "static/libraries", "libnccl"),
                           (TESTS / "CMakeLists.txt", "static/note", "is not a shared library")):
        told, found = results(file, code=1)
        expect(found[id]["text"], text)
        assert all(one["result"] == "skipped" for name, one in found.items() if name.startswith("life/")), found
    with tempfile.TemporaryDirectory() as folder:
        other = pathlib.Path(folder) / "other_name.so"
        other.write_bytes((GOOD / "fake_canary.so").read_bytes())
        _, found = results(other, "--static", code=1)
        expect(found["static/agree"]["text"], "other_name.so", "fake_canary")


def a_library_without_the_sdk_flags_is_told_which():
    _, found = results(BUILD / "tests/plugins/loose/fake_loose.so", "--static", code=1)
    expect(found["static/exports"]["text"], "symbols")
    expect(found["static/stays-loaded"]["text"], "nodelete")
    expect(found["static/search-path"]["text"], "/opt/somewhere")


def without_needed(library, name):
    """The bytes of a 64-bit ELF file with its need of `name` made a tag that says nothing (DT_DEBUG)."""
    data = bytearray(library.read_bytes())
    place, = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQ", data, place + i * size) for i in range(count)]
    offset_of = lambda address: next(offset + address - start for kind, _, offset, start, _, length in segments if kind == 1 and start <= address < start + length)  # noqa: E731
    _, _, at, _, _, length = next(segment for segment in segments if segment[0] == 2)
    entries = [(at + i, *struct.unpack_from("<QQ", data, at + i)) for i in range(0, length, 16)]
    texts = offset_of(next(value for _, tag, value in entries if tag == 5))
    for entry, tag, value in entries:
        if tag == 1 and data[texts + value:].startswith(name.encode()):
            struct.pack_into("<Q", data, entry, 21)
            return bytes(data)
    raise AssertionError(f"{library} does not need {name}")


def a_libstdcxx_inside_is_told_and_one_that_libtorch_brings_is_none():
    if not (HOST / "fake_draft.so").exists():
        print("        without LibTorch there are no plugins of tier torch_cxx to look at")
        return
    with tempfile.TemporaryDirectory() as folder:
        plugin = pathlib.Path(folder) / "fake_draft.so"
        plugin.write_bytes(without_needed(HOST / "fake_draft.so", "libstdc++"))
        assert "libstdc++" not in subprocess.run(["readelf", "-d", plugin], capture_output=True, text=True).stdout
        check(plugin, "--only", "static/libraries")
        with plugin.open("ab") as file:
            file.write(b"terminate called after throwing an instance of '")
        _, found = results(plugin, "--only", "static/libraries", code=1)
        expect(found["static/libraries"]["text"], "a libstdc++ of its own", "-static-libstdc++")


def what_should_have_been_refused_is_told():
    if not (HOST / "fake_draft.so").exists():
        print("        without LibTorch there are no algorithms to look at")
        return
    told, _ = results(HOST / "fake_draft.so", "--only", "algorithm/bad*", code=0)
    assert told["passed"] == 4 and told["skipped"] == 1, told
    for fault, id, *texts in (("any_config", "algorithm/bad-config", "describe takes an empty text as a target's config.json"),
                              ("any_width", "algorithm/bad-unit", "unit guess takes an input that is one column too wide without a word"),
                              ("missing_field", "algorithm/bad-batch", "the process ended by signal 6")):
        _, found = results(HOST / "fake_draft.so", "--set", f"plugin.fake_draft.fault={fault}", "--only", id, code=1)
        expect(found[id]["text"], *texts)
    check(HOST / "fake_effect.so", "--only", "sharding/go-on")
    _, found = results(HOST / "fake_effect.so", "--set", "plugin.fake_effect.forgetful=true", "--only", "sharding/go-on", code=1)
    expect(found["sharding/go-on"]["text"], "after going on has gradient norm")


def nothing_is_left_behind():
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        crashing = [BUILD / "bin/sf-plugin-check", GOOD / "fake_ok.so", "--only", "checkpoint/*", "--only", "life/whole"]
        done = subprocess.run(crashing, env=environment, capture_output=True, text=True)
        expect(done.stdout, "the process ended by signal", "pass  life/whole")
        assert not os.listdir(folder), os.listdir(folder)
        hanging = [BUILD / "bin/sf-plugin-check", GOOD / "fake_ok.so", "--set", "plugin.fake_ok.fail_in=hang", "--only", "life/create"]
        subprocess.run([*hanging, "--limit", "1"], env=environment, capture_output=True)
        assert not os.listdir(folder), os.listdir(folder)
        process = subprocess.Popen(hanging, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        limit = time.time() + 20
        while not any(pathlib.Path(folder).glob("*/trial/*")) and time.time() < limit:   # the trial is at work
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130, process.returncode
        assert not os.listdir(folder), os.listdir(folder)


def mistakes_on_the_command_line_are_told():
    for arguments in ((), ("--nothing",), (GOOD / "fake_ok.so", "--limit", "0"), ("/nonexistent.so",), (GOOD / "fake_ok.so", "--only")):
        done = subprocess.run([BUILD / "bin/sf-plugin-check", *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and "usage:" in done.stderr, (arguments, done)


if __name__ == "__main__":
    tiny.main(globals())
