"""launch.sh, with stand-ins for the environment and for SLURM; tests/slurm holds those to the real one."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.jobs import install_stand_in

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.integration

FLASH = """#!/bin/sh
echo "flash $* rdzv=${FLASH_RDZV_ENDPOINT-} nnodes=${FLASH_NNODES-} rank=${FLASH_NODE_RANK-} cwd=$PWD"
exit ${FLASH_EXIT-0}
"""

INSTALL = """
from importlib import import_module
from pathlib import Path

with (Path(__file__).parents[1] / "made.log").open("a") as log:
    log.write("made\\n")
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder whose environment is a script that prints how it was called."""
    root = tmp_path / "project"
    executable(root / ".venv" / "bin" / "flash", FLASH)
    install_stand_in(tmp_path / "bin")
    (tmp_path / "stand_in").mkdir()
    monkeypatch.setenv("SLURM_STAND_IN", str(tmp_path / "stand_in"))
    executable(root / "launch.sh", (ROOT / "launch.sh").read_text())
    (root / "scripts").mkdir()
    (root / "scripts" / "install.py").write_text(INSTALL)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "FLASH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def job(project, monkeypatch):
    """The variables of a batch script on the first of two nodes, run from Slurm's copy of the script."""
    spooled = project.parent / "spool" / "slurm_script"
    spooled.parent.mkdir()
    shutil.copy(project / "launch.sh", spooled)
    for name, value in {
        "SLURM_JOB_ID": "20042",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODEID": "0",
        "COMMAND": str(project / "launch.sh"),
    }.items():
        monkeypatch.setenv(name, value)
    return spooled


def launch(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], "train {root}/examples/quickstart.toml"),
        (["mine.toml", "train.async_ratio=0"], "train mine.toml train.async_ratio=0"),
        (["train.async_ratio=0"], "train {root}/examples/quickstart.toml train.async_ratio=0"),
        (["--dry-run"], "train {root}/examples/quickstart.toml --dry-run"),
        (["mine.toml", "run.output_dir=a b"], "train mine.toml run.output_dir=a b"),
        (["join", "outputs/mine", "engine.count=4"], "join outputs/mine engine.count=4"),
    ],
)
def test_a_plain_start_makes_the_environment_and_trains_the_configuration_or_joins_a_run(project, arguments, passed):
    done = launch(project / "launch.sh", *arguments)
    assert done.stdout == f"flash {passed.format(root=project)} rdzv= nnodes= rank= cwd={project.parent}\n"
    assert (done.returncode, done.stderr) == (0, "")
    assert (project / "made.log").read_text() == "made\n"


@pytest.fixture
def fresh(project):
    """The same project before its environment is made."""
    shutil.rmtree(project / ".venv")
    return project


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["join", "--help"], ["mine.toml", "--help"]])
def test_help_needs_no_environment(fresh, arguments):
    done = launch(fresh / "launch.sh", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "./launch.sh [CONFIG] [KEY=VALUE…]" in done.stdout
    assert "set -euo" not in done.stdout
    assert "docs/commands.md" in done.stdout
    assert not (fresh / "made.log").exists()


def test_a_missing_configuration_is_refused_before_anything_is_fetched(fresh):
    done = launch(fresh / "launch.sh", "none.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no configuration file none.toml")
    assert not (fresh / "made.log").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--dry-run"], ["train.async_ratio=0"], ["mine.toml", "--res", "run.name=a b"]),
        ["join", "nowhere", "--hub", "a:1"],
    ],
)
def test_right_arguments_make_the_environment(fresh, arguments):
    for file in (Path("mine.toml"), fresh / "examples" / "quickstart.toml"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    launch(fresh / "launch.sh", *arguments)
    assert (fresh / "made.log").exists()


def test_the_command_is_told_what_was_typed(project):
    executable(project / ".venv" / "bin" / "flash", "#!/bin/sh\necho $FLASH_TYPED\n")
    script = project / "launch.sh"
    assert shlex.split(launch(script, "mine.toml", "run.name=a b", "x='1'").stdout) == [
        *(str(script), "mine.toml", "run.name=a b", "x='1'")
    ]
    beside = ["bash", "launch.sh", "--resume"]
    done = subprocess.run(beside, capture_output=True, text=True, check=True, timeout=60, cwd=project)
    assert shlex.split(done.stdout) == ["./launch.sh", "--resume"]


def test_the_exit_code_of_the_run_is_that_of_the_script(project, monkeypatch):
    monkeypatch.setenv("FLASH_EXIT", "7")
    assert launch(project / "launch.sh").returncode == 7


def test_a_failing_environment_stops_the_script(project):
    (project / "scripts" / "install.py").write_text("raise SystemExit(1)")
    done = launch(project / "launch.sh")
    assert done.returncode != 0
    assert done.stdout == ""


def test_an_environment_keeps_its_python_unless_another_is_named(project, monkeypatch):
    for place in (".venv/bin/python", "named"):
        executable(project / place, f"#!/bin/sh\ncase $1 in *install.py) echo {place};; esac\n")
    assert launch(project / "launch.sh").stdout.startswith(".venv/bin/python\nflash train ")
    monkeypatch.setenv("PYTHON", str(project / "named"))
    assert launch(project / "launch.sh").stdout.startswith("named\nflash train ")


def test_a_batch_script_runs_once_per_node_with_the_rendezvous(job, project, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    done = launch(job, "mine.toml", "run.steps=3")
    assert (done.returncode, done.stderr) == (0, "")
    start = "flash train mine.toml cluster.nodes=2 run.steps=3 rdzv=node7:10042 nnodes=2"
    assert sorted(done.stdout.splitlines(), reverse=True) == [
        "srun cpus=12",
        f"{start} rank=1 cwd={project.parent}",
        f"{start} rank=0 cwd={project.parent}",
    ]


def test_the_submission_folder_serves_where_slurm_does_not_tell_the_script(job, project, monkeypatch):
    monkeypatch.setenv("COMMAND", "(null)")
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(project))
    assert "rank=1" in launch(job, "mine.toml").stdout


def test_a_job_submitted_from_elsewhere_says_so(job, project, monkeypatch):
    monkeypatch.setenv("COMMAND", "(null)")
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(project.parent))
    done = launch(job, "mine.toml")
    assert done.returncode == 1
    assert done.stderr == "error: cannot find the folder of launch.sh; submit the job from there\n"


def test_inside_a_step_the_script_runs_on_its_node_only(job, project, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert launch(project / "launch.sh", "mine.toml").stdout.startswith("flash train mine.toml rdzv= ")
