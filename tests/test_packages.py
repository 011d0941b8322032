"""Packages that are missing or too old: one line, before anything is imported or created."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from common import packages
from common.errors import ResourceError
from tests.conftest import ROOT


@pytest.mark.parametrize(
    "package, version, fault",
    [
        ("torch", None, "has no torch; torch>=2.10 is needed; "),
        ("torch", "2.9.1", "has torch 2.9.1; torch>=2.10 is needed; "),
        ("pyyaml", "5.4", "has pyyaml 5.4; pyyaml>=6.0 is needed; "),
        ("pillow", None, "has no pillow; pillow is needed; "),
        ("protobuf", None, "has no protobuf; protobuf is needed; "),
    ],
)
def test_a_missing_or_old_package_is_named_with_the_command_that_installs_it(
    package, version, fault, monkeypatch
):
    installed = packages._installed_version

    def changed(name):
        return version if name == package else installed(name)

    monkeypatch.setattr(packages, "_installed_version", changed)
    with pytest.raises(ResourceError) as caught:
        packages.check_packages()
    message = str(caught.value)
    assert message.startswith(f"{sys.executable} {fault}")
    assert message.endswith(f"install it: {sys.executable} -m pip install -r requirements.txt")


@pytest.mark.parametrize("package", ["torch", "numpy", "tqdm", "pyyaml", "tensorboard"])
def test_the_versions_of_the_installed_packages_are_found(package):
    release = metadata.version(package).partition("+")[0]
    assert packages._installed_version(package) == release


@pytest.mark.parametrize("package", ["pillow", "protobuf"])
def test_what_comes_with_tensorboard_is_looked_for_without_an_import(package):
    assert packages._installed_version(package) is not None
    assert packages._installed_version(f"{package}.nothing") is None


@pytest.mark.parametrize(
    "command", ["train.py configs/smoke.yaml --out_dir=OUT", "sample.py --ckpt OUT --prompt x"]
)
def test_without_any_package_the_commands_print_one_line_and_create_nothing(command, tmp_path):
    out = tmp_path / "out"
    words = command.replace("OUT", str(out)).split()
    environment = {"PATH": os.environ["PATH"], "SYSTEMROOT": os.environ.get("SYSTEMROOT", "")}
    done = subprocess.run(
        [sys.executable, "-S", *words],  # -S: without site-packages
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 5 and not done.stdout and not out.exists()
    assert done.stderr.startswith(f"error: {sys.executable} has no torch; ")
    assert done.stderr.count("\n") == 1
