"""The package `flash.environment`: its public names, and the cost of its import."""

import subprocess
import sys

import flash.environment


def test_every_public_name_is_there_and_none_is_missing_from_the_list():
    given = {
        name
        for name, value in vars(flash.environment).items()
        if not name.startswith("_") and type(value) is not type(sys)
    }
    assert set(flash.environment.__all__) == given


def test_the_import_loads_no_large_package():
    heavy = "torch", "transformers", "vllm", "algorithms", "flash.config.tree"
    code = f"import sys, flash.environment; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
