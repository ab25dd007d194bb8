#!/usr/bin/env python3
"""The JSON schema that sf-host prints for TOML editors: valid by a validator of its own, takes every recipe here and refuses what sf-host refuses, in an editor's
own checker, too.

    tests/sdk/schema.py BUILD_DIR TESTS_DIR [CASE ...]
"""
import copy
import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

BUILD, TESTS = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "e2e"))
for line in subprocess.run([ROOT / "tools" / "setup", "--print"], check=True, capture_output=True, text=True).stdout.splitlines():
    name, _, value = line.removeprefix("export ").partition("=")
    if name == "SF_TEST_PYTHON_DIR":
        sys.path.insert(0, value)
        TAPLO = pathlib.Path(value) / "bin" / "taplo"   # what the editor plugin "Even Better TOML" is made of

import fastjsonschema  # noqa: E402
import tiny  # noqa: E402

SCHEMA = json.loads(subprocess.run([BUILD / "bin" / "sf-host", "schema"], check=True, capture_output=True, text=True).stdout)


def refused(check, recipe):
    try:
        check(recipe)
    except fastjsonschema.JsonSchemaValueException as error:
        return error.message
    raise AssertionError(f"was not refused: {recipe}")


def recipes_of_this_build(root):
    recipes = sorted(path for path in (root / "recipes").glob("*.toml"))
    recipes.append(root / "sdk" / "template" / "recipes" / "demo.toml")
    assert len(recipes) > 8
    listed = json.loads(subprocess.run([BUILD / "bin" / "sf-host", "plugins", "--json"], check=True, capture_output=True, text=True).stdout)
    installed = {plugin["name"] for plugin in listed} | {"", "my_draft"}   # a build without LibTorch has no algorithms, and the schema not their keys
    return [path for path in recipes if tomllib.loads(path.read_text()).get("algorithm", {}).get("name", "") in installed]


def it_is_a_schema_and_takes_every_recipe():
    check = fastjsonschema.compile(SCHEMA)
    for path in recipes_of_this_build(ROOT):
        try:
            check(tomllib.loads(path.read_text()))
        except fastjsonschema.JsonSchemaValueException as error:
            raise AssertionError(f"{path.name}: {error.message}") from error


def an_editor_takes_every_recipe_and_underlines_what_is_wrong():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "schema.json").write_text(json.dumps(SCHEMA))

        def lint(*files):
            return subprocess.run([TAPLO, "lint", "--no-auto-config", "--schema", f"file://{folder}/schema.json", *files], cwd=folder, capture_output=True, text=True)

        done = lint(*recipes_of_this_build(ROOT))
        assert done.returncode == 0, done.stderr
        for text, told in (("[training]\nbatch_sise = 2\n", "'batch_sise' was unexpected"), ("[training]\nbatch_size = 0\n", "0 is less than the minimum of 1"),
                           ('[model]\ntorch_dtype = "float8"\n', '"float8" is not one of'), ('[backend]\ntrackers = "tensorboard"\n', 'is not of type "array"')):
            (folder / "bad.toml").write_text(text)
            done = lint(folder / "bad.toml")
            assert done.returncode != 0 and told in done.stderr, (text, done.stderr)


def it_refuses_what_sf_host_refuses():
    check = fastjsonschema.compile(SCHEMA)
    good = tomllib.loads((ROOT / "recipes" / "qwen3-8b-base.toml").read_text())
    check(good)
    for section, key, value in (("training", "batch_sise", 2), ("training", "batch_size", 0), ("training", "batch_size", "two"), ("model", "torch_dtype", "float8"),
                                ("backend", "trackers", "tensorboard"), (None, "run_id", "a/b"), (None, "trainning", {})):
        recipe = copy.deepcopy(good)
        (recipe if section is None else recipe.setdefault(section, {}))[key] = value
        assert refused(check, recipe)


def every_key_has_a_description_and_a_default_that_it_takes():
    def walk(schema, path):
        for name, one in schema["properties"].items():
            here = f"{path}.{name}"
            if one.get("type") == "object":
                assert one["additionalProperties"] is False, here
                walk(one, here)
            else:
                assert len(one["description"]) > 7, here
                if "default" in one:
                    fastjsonschema.compile({**one})(one["default"])
    walk(SCHEMA, "")


if __name__ == "__main__":
    tiny.main(globals())
