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
#     ./launch.sh [CONFIG] [KEY=VALUE…]              here; without CONFIG, examples/quickstart.toml
#     sbatch --nodes=4 --gpus-per-node=8 launch.sh CONFIG [KEY=VALUE…]
#     sbatch --nodes=2 --gpus-per-node=8 launch.sh join RUN_DIR [KEY=VALUE…]
#
# The script makes the environment first if it is missing or out of date. Under sbatch every node of the job runs
# `flash train` once. A job that is preempted or reaches its time limit is stopped in order and requeued, and the run
# continues. With `join` every node runs `flash join`: the job makes samples for the run of another job, and may end
# before that run.
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

# Run one `flash train` or `flash join` on each node of the job. Nodes that train find each other at the first node.
#
# A rank is here the command of one node. Slurm asks for the end in two ways: at the time limit it signals this script
# (by --signal above), and at a preemption with a grace time it signals the ranks. In both cases the ranks write a
# checkpoint, and their exit code says that they were interrupted. A node that has joined leaves its run in order, which
# is no failure. It does so alone: the job kills no other node if one of them fails (`kill_all`).
run_on_slurm() {
    local head kill_all=1 preempted="" srun_pid status=0
    if [[ $2 == join ]]; then kill_all=0; fi
    read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export FLASH_RDZV_ENDPOINT=$head:$((10000 + SLURM_JOB_ID % 20000))
    export FLASH_NNODES=$SLURM_JOB_NUM_NODES
    # srun does not inherit this value from sbatch.
    if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
    # The rank of the first node, which runs on this machine, writes this file if it was interrupted.
    FLASH_INTERRUPTED=$(mktemp -u "${TMPDIR:-/tmp}/flash-interrupted.XXXXXX")
    export FLASH_INTERRUPTED

    # scancel signals the ranks, because srun itself would kill them before they have written a checkpoint.
    trap 'preempted=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID" || true' TERM
    # Signals reach the whole process group of a rank, so this shell ignores them. Exit code 130 is an interrupted rank,
    # 143 a rank that did not handle signals yet. Both exit with 0 here, because srun kills all ranks when one fails.
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
            # 75: a node without trainers has failed for good. The run goes on without it, so the job does, too.
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
    # Each signal interrupts `wait` while the ranks are still writing their checkpoint, so wait again.
    wait "$srun_pid" || status=$?
    while kill -0 "$srun_pid" 2>/dev/null; do
        status=0
        wait "$srun_pid" || status=$?
    done
    # An interrupt that follows from the failure of another rank is no preemption. srun then returns the code of that
    # failure.
    if [[ -e $FLASH_INTERRUPTED && $status == 0 ]]; then preempted=1; fi
    rm -f "$FLASH_INTERRUPTED"
    if [[ -z $preempted ]]; then return "$status"; fi

    # A job that was cancelled, or that Slurm requeues by itself, is no longer in state RUNNING.
    if scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
        echo "requeueing job $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

# Print the arguments of this script. This needs no environment.
usage() {
    sed -n 's/^# \{0,1\}//; /^Trains a configuration/,/^set /{ /^set /q; p; }' "$root/launch.sh"
    echo
    echo "CONFIG is a file such as examples/tiny.toml, KEY=VALUE is a setting such as train.async_ratio=2: docs/configuration.md has them all."
    echo "Options are passed on to \`flash train\`, after \`join\` to \`flash join\`: docs/commands.md has them all."
    if [[ -x $root/.venv/bin/flash ]]; then
        echo "\`.venv/bin/flash COMMAND --help\` says more about the commands train, join and others."
    fi
}

# Refuse a configuration that does not exist before gigabytes are fetched. The command itself checks everything else,
# once there is an environment.
refuse_missing_configuration() {
    if [[ $1 != join && -n ${2-} && $2 != -* && $2 != *=* && ! -e $2 ]]; then
        echo "error: there is no configuration file $2; the smallest one is examples/tiny.toml" >&2
        return 2
    fi
}

# The command that the user typed, for the hint how to resume after an interrupt.
typed=("$0" "$@")
if [[ $0 != */* ]]; then typed[0]=./$0; fi

root=$(find_root)
for word in "$@"; do
    if [[ $word == -h || $word == --help ]]; then usage && exit; fi
done
flash=("$root/.venv/bin/flash")
case "${1-}" in
    join) flash+=("$1") && shift ;;
    "" | -* | *=*) flash+=(train "$root/examples/quickstart.toml") ;;
    *) flash+=(train "$1") && shift ;;
esac

if [[ ! -x $root/.venv/bin/flash ]]; then refuse_missing_configuration "${flash[@]:1}"; fi

# The same as `make env`, but not every machine has make. An existing environment keeps its Python.
python=$root/.venv/bin/python
"$python" -c '' 2>/dev/null || python=python3
"${PYTHON:-$python}" "$root/scripts/install.py"

# 4294967290 is the step that salloc gives to an interactive shell. In any other step this script is one task of an srun,
# and must not start further ones. SLURM_JOB_ID alone may be left over in an environment, so the list of nodes must be
# set, too.
if [[ -n ${SLURM_JOB_ID-} && -n ${SLURM_JOB_NODELIST-} && ${SLURM_STEP_ID:-4294967290} == 4294967290 ]]; then
    if [[ ${flash[1]} != join ]]; then flash+=("cluster.nodes=$SLURM_JOB_NUM_NODES"); fi
    run_on_slurm "${flash[@]}" "$@"
else
    export FLASH_TYPED="${typed[*]@Q}"
    exec "${flash[@]}" "$@"
fi
