#!/usr/bin/env python3
"""sf as it is installed and packed: the tree, what its binaries need, and docs/writing-a-plugin.md command by command, with nothing of the source tree in reach.

    tests/sdk/installed.py BUILD_DIR TESTS_DIR [CASE ...]
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

BUILD, TESTS = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "e2e"))

import tiny  # noqa: E402
from tiny import expect  # noqa: E402

WORK = pathlib.Path(tempfile.mkdtemp(prefix="sf-sdk-"))
PREFIX = WORK / "prefix"
CACHE = dict(line.split("=", 1) for line in (BUILD / "CMakeCache.txt").read_text().splitlines() if "=" in line and not line.startswith(("#", "//")))
TORCH = pathlib.Path(next(value for key, value in CACHE.items() if key.startswith("Sf_TORCH_ROOT:")))
# What an author's shell has: nothing that names this build.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("SF_", "CMAKE_", "Sf_", "CI"))} | {"OMP_NUM_THREADS": "1"}
# Everything that a binary may need besides what it brings and the torch wheel: libc and libstdc++ with their parts.
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libdl.so.2", "libpthread.so.0"}


def run(*command, cwd=WORK, code=0, env=CLEAN, timeout=400):
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert code is None or done.returncode == code, f"{command}: exit {done.returncode}, expected {code}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def install(prefix):
    if not prefix.exists():
        run("cmake", "--install", BUILD, "--prefix", prefix)


def dynamic(path):
    """(needed libraries, search path) of an ELF file."""
    text = run("readelf", "-d", path).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", text)), [folder for path in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text) for folder in path.split(":")]


def binaries(prefix):
    return [path for path in [*(prefix / "bin").iterdir(), *(prefix / "lib/sf").glob("*.so"), *(prefix / "lib/sf/plugins").glob("*.so")]]


def the_tree_has_its_places_and_sf_host_finds_plugins_by_its_own_path():
    install(PREFIX)
    for path in ("bin/sf-host", "bin/sf-plugin-check", "lib/sf/libsf_engine.so", "lib/sf/plugins/dflash2.so", "lib/sf/plugins/tensorboard.so", "include/sf/plugin.h",
                 "include/sf/tracker.h", "include/sdk/draft/objective.hpp", "include/sdk/testing/plugin_test.hpp", "lib/cmake/Sf/SfConfig.cmake",
                 "lib/cmake/Sf/SfAddPlugin.cmake", "share/sf/recipes/qwen3-8b-dflash2.toml", "share/sf/template/plugin.toml", "share/sf/schema.json", "share/sf/LICENSE"):
        assert (PREFIX / path).exists(), path
    assert "training" in json.loads((PREFIX / "share/sf/schema.json").read_text())["properties"]
    for text in [*(PREFIX / "lib/cmake/Sf").iterdir(), *(PREFIX / "include").rglob("*.h*")]:
        content = text.read_text()
        assert str(ROOT) not in content and str(BUILD) not in content, f"{text} names the source tree"
    link = WORK / "elsewhere" / "sf-host"
    link.parent.mkdir()
    link.symlink_to(PREFIX / "bin/sf-host")
    listed = {plugin["name"]: plugin for plugin in json.loads(run(link, "plugins", "--json").stdout)}
    assert {"single", "fsdp1", "fsdp2", "dflash2", "dspark", "eagle3", "tensorboard"} <= set(listed), listed.keys()
    for plugin in listed.values():
        assert plugin["fits"] and plugin["path"].startswith(str(PREFIX)), plugin


def binaries_need_the_c_and_cxx_libraries_and_the_torch_wheel_alone():
    install(PREFIX)
    brought = {path.name for path in binaries(PREFIX)}
    wheel = {path.name for folder in [TORCH / "lib", *TORCH.parent.glob("nvidia/*/lib")] for path in folder.glob("*.so*")}
    for path in binaries(PREFIX):
        needed, folders = dynamic(path)
        foreign = needed - SYSTEM - brought - wheel
        if path.name == "libsf_comm_gloo.so":   # several ranks on CPUs, and only they
            foreign = {name for name in foreign if not name.startswith("libgloo")}
        assert not foreign, f"{path.name} needs {foreign}"
        assert str(BUILD) not in ":".join(folders), (path, folders)
        if path.parent.name == "plugins" or path.parent.name == "bin":
            assert not folders, (path, folders)
        if 'VERSION_ID="12"' in pathlib.Path("/etc/os-release").read_text():   # built here it runs on Debian 12 and Ubuntu 24.04: glibc 2.36, libstdc++ of g++ 12
            for library, newest in (("GLIBC", (2, 36)), ("GLIBCXX", (3, 4, 30))):
                wanted = re.findall(rf"\b{library}_([0-9.]+)", run("objdump", "-T", path).stdout)
                assert max((tuple(map(int, version.split("."))) for version in wanted), default=(0,)) <= newest, (path, library, set(wanted))
    assert not dynamic(PREFIX / "bin/sf-host")[0] & wheel, "sf-host itself needs no LibTorch"


def the_tutorial_works_command_by_command_with_nothing_of_the_source_tree():
    install(PREFIX)
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/writing-a-plugin.md").read_text(), re.M | re.S)
    readme = re.findall(r"^```sh\n(.*?)^```", (PREFIX / "share/sf/template/README.md").read_text(), re.M | re.S)
    assert readme[0] == blocks[0] and len(blocks[0].splitlines()) == 5, "five commands, the same in both texts"
    assert set(readme[1].splitlines()) <= set(blocks[1].splitlines())
    folder = WORK / "author"
    folder.mkdir()
    times = []
    where = folder
    for block in blocks:
        start = time.time()
        (folder / "block.sh").write_text("set -eux\n" + block)
        environment = CLEAN | {"PREFIX": str(PREFIX), "SF_PLUGIN_PATH": str(folder / "my_draft/build/lib/sf/plugins")}
        if not times:
            del environment["SF_PLUGIN_PATH"]
        done = run("bash", folder / "block.sh", cwd=where, env=environment)
        times.append(time.time() - start)
        if where == folder:
            expect(done.stdout, "my_draft", "my_tracker", "100% tests passed")
            where = folder / "my_draft"
    print(f"        five commands: {times[0]:.0f} s; all {len(blocks)} blocks: {sum(times):.0f} s")
    assert times[0] < 180, times
    metrics = [json.loads(line) for line in (where / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in metrics) == 3
    assert (where / "runs/export/model.safetensors").exists()
    cache = (where / "build/CMakeCache.txt").read_text()
    assert str(ROOT) not in cache.replace(str(PREFIX), ""), "the build of the template knows the source tree"


def clang_builds_plugins_too():
    install(PREFIX)
    if shutil.which("clang++") is None:
        print("        there is no clang++ here")
        return
    folder = WORK / "with_clang"
    (folder / "src").mkdir(parents=True)
    for name in ("plugin.cpp", "plugin.toml"):
        shutil.copy(PREFIX / "share/sf/template/tracker" / name, folder / "src")
    (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES CXX)\nfind_package(Sf CONFIG REQUIRED)\nenable_testing()\n"
                                           "sf_add_plugin(my_tracker KIND tracker TIER c MANIFEST src/plugin.toml SOURCES src/plugin.cpp)\n")
    run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={PREFIX}", "-DCMAKE_CXX_COMPILER=clang++", cwd=folder)
    run("cmake", "--build", "build", cwd=folder)
    done = run(PREFIX / "bin/sf-plugin-check", folder / "build/lib/sf/plugins/my_tracker.so")
    expect(done.stdout, " 0 failed, 0 skipped")
    expect(run(PREFIX / "bin/sf-host", "doctor", "--plugin-path", folder / "build/lib/sf/plugins", code=None).stdout, "my_tracker.so (version 0.1.0, clang++ ")


def another_libtorch_is_refused_when_the_plugin_is_configured():
    install(PREFIX)
    other = WORK / "other_torch" / "torch"
    (other / "lib").mkdir(parents=True)
    (other / "lib/libtorch_cpu.so").touch()
    (other / "version.py").write_text("__version__ = '2.10.0+cpu'\n")
    shutil.copytree(PREFIX / "share/sf/template", WORK / "refused")
    done = run("cmake", "-S", WORK / "refused", "-B", WORK / "refused/build", f"-DCMAKE_PREFIX_PATH={PREFIX}", f"-DSf_TORCH_ROOT={other}", code=1)
    expect(re.sub(r"\s+", " ", done.stderr), "2.10.0+cpu", "was built with LibTorch 2.11.0", "Set Sf_TORCH_ROOT")


def the_tarball_runs_elsewhere_with_the_torch_wheel_beside_it():
    done = run("cpack", "-G", "TGZ", "-B", WORK / "packed", "--config", BUILD / "CPackConfig.cmake")
    tarball = next((WORK / "packed").glob("sf-*.tar.gz"))
    run("tar", "xzf", tarball, "-C", WORK)
    unpacked = WORK / tarball.name.removesuffix(".tar.gz")
    for path in (unpacked / "lib/sf").glob("*.so"):
        for folder in dynamic(path)[1]:
            assert folder.startswith("$ORIGIN"), (path, folder)
    expect((unpacked / "README").read_text(), "pip install", "libgloo")
    recipe = unpacked / "share/sf/template/recipes/demo.toml"
    arguments = ("plan", recipe, "--set", "algorithm.name=eagle3", "--set", "backend.trackers=[\"tensorboard\"]", "--set", "plugin.eagle3.draft_vocab_size=200",
                 "--set", "model.target_layer_ids=[1, 3, 5]")
    alone = run(unpacked / "bin/sf-host", *arguments, code=None)
    assert alone.returncode != 0, "without LibTorch a plan has no sizes"
    expect(alone.stdout + alone.stderr, "libtorch")
    assert str(TORCH) not in (unpacked / "lib/cmake/Sf/SfConfig.cmake").read_text(), "a package knows nothing of this machine"
    told = run("cmake", "-S", unpacked / "share/sf/template", "-B", WORK / "beside", f"-DCMAKE_PREFIX_PATH={unpacked}", f"-DSf_TORCH_ROOT={TORCH}").stderr
    expect(re.sub(r"\s+", " ", told), "looks for LibTorch beside itself", f"ln -s {TORCH} {unpacked}/torch")
    (unpacked / "torch").symlink_to(TORCH)
    (unpacked / "nvidia").symlink_to(TORCH.parent / "nvidia")
    expect(run(unpacked / "bin/sf-host", *arguments).stdout, "weights", "optimizer", str(unpacked / "lib/sf/plugins/eagle3.so"))
    print(f"        {tarball.name}: {tarball.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    try:
        tiny.main(globals())
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
