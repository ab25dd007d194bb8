#!/usr/bin/env python3
"""The JSON schema that sf-host prints for TOML editors: valid by a validator of its own, takes every recipe here and refuses what sf-host refuses.

    tests/sdk/schema.py BUILD_DIR TESTS_DIR [CASE ...]
"""
import copy
import json
import pathlib
import subprocess
import sys
import tomllib

BUILD, TESTS = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "e2e"))
for line in subprocess.run([ROOT / "tools" / "setup", "--print"], check=True, capture_output=True, text=True).stdout.splitlines():
    name, _, value = line.removeprefix("export ").partition("=")
    if name == "SF_TEST_PYTHON_DIR":
        sys.path.insert(0, value)

import fastjsonschema  # noqa: E402
import tiny  # noqa: E402

SCHEMA = json.loads(subprocess.run([BUILD / "bin" / "sf-host", "schema"], check=True, capture_output=True, text=True).stdout)


def refused(check, recipe):
    try:
        check(recipe)
    except fastjsonschema.JsonSchemaValueException as error:
        return error.message
    raise AssertionError(f"was not refused: {recipe}")


def it_is_a_schema_and_takes_every_recipe():
    check = fastjsonschema.compile(SCHEMA)
    recipes = sorted(path for path in (ROOT / "recipes").glob("*.toml"))
    recipes.append(ROOT / "sdk" / "template" / "recipes" / "demo.toml")
    assert len(recipes) > 8
    listed = json.loads(subprocess.run([BUILD / "bin" / "sf-host", "plugins", "--json"], check=True, capture_output=True, text=True).stdout)
    installed = {plugin["name"] for plugin in listed} | {"", "my_draft"}   # a build without LibTorch has no algorithms, and the schema not their keys
    for path in recipes:
        recipe = tomllib.loads(path.read_text())
        if recipe.get("algorithm", {}).get("name", "") in installed:
            try:
                check(recipe)
            except fastjsonschema.JsonSchemaValueException as error:
                raise AssertionError(f"{path.name}: {error.message}") from error


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
    tiny.run_cases([it_is_a_schema_and_takes_every_recipe, it_refuses_what_sf_host_refuses, every_key_has_a_description_and_a_default_that_it_takes])
