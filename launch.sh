#!/usr/bin/env bash
#SBATCH --job-name=flash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
#SBATCH --output=slurm-%j.out
#
# Trains a configuration:
#
#     ./launch.sh [CONFIG] [OVERRIDE…]              here; without CONFIG, examples/quickstart.toml
#     sbatch --nodes=4 --gpus-per-node=8 launch.sh CONFIG [OVERRIDE…]
#     sbatch --nodes=2 --gpus-per-node=8 launch.sh join RUN_DIR [OVERRIDE…]
#
# Makes the environment first where it is missing or out of date. Under sbatch every node of the job runs `flash train`
# once, and a job that is preempted or reaches its time limit is stopped in order, requeued, and continues. With `join`
# every node runs `flash join`: the job makes samples for the run of another job, and may end before it.
set -euo pipefail

# The folder of this script. Slurm runs a copy of it from a spool folder, but knows where it was submitted from.
find_root() {
    local here command
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    if [[ ! -f $here/scripts/install.py && -n ${SLURM_JOB_ID-} ]]; then
        command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
        here=$(dirname "$command")
        [[ -f $here/scripts/install.py ]] || here=${SLURM_SUBMIT_DIR-}
    fi
    if [[ ! -f $here/scripts/install.py ]]; then
        echo "error: cannot find the folder of launch.sh; submit the job from there" >&2
        return 1
    fi
    echo "$here"
}

# One `flash train` or `flash join` per node of the job; those that train meet at the first one.
#
# Slurm asks for the end in two ways: it signals this script (the time limit, by --signal above), or the ranks (preemption
# with a grace time). Either way the ranks write a checkpoint, and what they exit with says that they were interrupted.
# Nodes that have joined leave their run in order, which is no failure: each for itself, whatever becomes of the others.
run_on_slurm() {
    local head kill_all=1 preempted="" srun_pid status=0
    if [[ $2 == join ]]; then kill_all=0; fi
    read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export FLASH_RDZV_ENDPOINT=$head:$((10000 + SLURM_JOB_ID % 20000))
    export FLASH_NNODES=$SLURM_JOB_NUM_NODES
    # srun does not take this from sbatch by itself.
    if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
    # Written by the first node's rank, which runs on this machine.
    FLASH_INTERRUPTED=$(mktemp -u "${TMPDIR:-/tmp}/flash-interrupted.XXXXXX")
    export FLASH_INTERRUPTED

    # The ranks are signalled through scancel: srun itself would kill them, checkpoint or not.
    trap 'preempted=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID" || true' TERM
    # Signals reach the whole process group of a rank, this shell too. 143 is a rank that had not begun to listen. An
    # interrupted rank counts as a good one, since srun kills the others when one is bad.
    # shellcheck disable=SC2016  # the node's own shell expands these
    srun --nodes="$FLASH_NNODES" --ntasks="$FLASH_NNODES" --ntasks-per-node=1 --kill-on-bad-exit="$kill_all" \
        bash -c '
            trap : TERM INT
            FLASH_SPARE_NODE=$(mktemp -u "${TMPDIR:-/tmp}/flash-spare.XXXXXX")
            export FLASH_SPARE_NODE
            FLASH_NODE_RANK=$SLURM_NODEID "$@"
            status=$?
            # `flash train` leaves this file on a node that has neither trainers nor the hub.
            spare=""
            if [[ -e $FLASH_SPARE_NODE ]]; then spare=1; fi
            rm -f "$FLASH_SPARE_NODE"
            # A node without trainers that has failed for good: the run goes on, and with it the job that it is of.
            if ((status == 75)) && [[ $2 != join ]]; then exit 0; fi
            if ((status > 128 && status != 130 && status != 143)); then
                lost="node $SLURM_NODEID ($SLURMD_NODENAME): flash $2 was killed by signal $((status - 128))"
                if [[ -n $spare ]]; then
                    echo "$lost; the run goes on without this node" >&2
                    exit 0
                fi
                if [[ $2 != join ]]; then lost+=", which ends the job"; fi
                echo "$lost" >&2
            fi
            if ((status != 130 && status != 143)); then exit "$status"; fi
            if ((SLURM_NODEID == 0)); then touch "$FLASH_INTERRUPTED"; fi' bash "$@" &
    srun_pid=$!
    # Each signal cuts a wait short, while the ranks are still writing their checkpoint.
    wait "$srun_pid" || status=$?
    while kill -0 "$srun_pid" 2>/dev/null; do
        status=0
        wait "$srun_pid" || status=$?
    done
    # A rank that is interrupted because another one failed is no preemption: srun has that one's exit code.
    if [[ -e $FLASH_INTERRUPTED && $status == 0 ]]; then preempted=1; fi
    rm -f "$FLASH_INTERRUPTED"
    if [[ -z $preempted ]]; then return "$status"; fi

    # A job that was cancelled, or that Slurm requeues by itself, is not running any more.
    if scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
        echo "requeueing job $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

# What this script takes, which needs no environment.
usage() {
    sed -n 's/^# \{0,1\}//; /^Trains a configuration/,/^set /{ /^set /q; p; }' "$root/launch.sh"
    echo
    echo "Options: ${options[train]} of a plain start; ${options[join]} of join."
    echo "CONFIG is a file such as examples/tiny.toml, OVERRIDE such as train.async_ratio=2: docs/configuration.md has them all."
    if [[ -x $root/.venv/bin/flash ]]; then
        echo "\`.venv/bin/flash COMMAND --help\` says more, of commands train, join and others."
    fi
}

# Before gigabytes are fetched: an option that no command has, or a configuration that is not there. Once there is an
# environment, the command itself says more of it.
refuse_wrong_arguments() {
    local known word
    for word in "${@:2}"; do
        if [[ $word != -* ]]; then continue; fi
        for known in ${options[$1]}; do
            if [[ $known == "${word%%=*}"* ]]; then continue 2; fi
        done
        echo "error: $1 has no option $word; ./launch.sh --help lists them" >&2
        return 2
    done
    if [[ $1 != join && -n ${2-} && $2 != -* && $2 != *=* && ! -e $2 ]]; then
        echo "error: there is no configuration file $2; the smallest one is examples/tiny.toml" >&2
        return 2
    fi
}

# What to type to go on, for the hint after an interrupt.
typed=("$0" "$@")
if [[ $0 != */* ]]; then typed[0]=./$0; fi

root=$(find_root)
declare -A options=(
    [train]="--dry-run --resume"
    [join]="--hub"
)
for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then usage && exit; fi
done
flash=("$root/.venv/bin/flash")
case "${1-}" in
    join) flash+=("$1") && shift ;;
    "" | -* | *=*) flash+=(train "$root/examples/quickstart.toml") ;;
    *) flash+=(train "$1") && shift ;;
esac

if [[ ! -x $root/.venv/bin/flash ]]; then refuse_wrong_arguments "${flash[1]}" "${flash[@]:2}" "$@"; fi

# As `make env` does, but not every machine has make. An environment that is there keeps its Python.
python=$root/.venv/bin/python
"$python" -c '' 2>/dev/null || python=python3
"${PYTHON:-$python}" "$root/scripts/install.py"

# 4294967290 is the step that salloc gives to an interactive shell; any other step is one task of an srun.
# A job id alone may be left over in an environment: a job has nodes.
if [[ -n ${SLURM_JOB_ID-} && -n ${SLURM_JOB_NODELIST-} && ${SLURM_STEP_ID:-4294967290} == 4294967290 ]]; then
    if [[ ${flash[1]} != join ]]; then flash+=("cluster.nodes=$SLURM_JOB_NUM_NODES"); fi
    run_on_slurm "${flash[@]}" "$@"
else
    export FLASH_TYPED="${typed[*]@Q}"
    exec "${flash[@]}" "$@"
fi
