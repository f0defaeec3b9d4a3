#!/usr/bin/env bash
# Trains small runs on a Slurm of two nodes that are both this machine: bash tools/cluster_test.sh
#
# Needs root, and, as on Debian,
#   apt-get install --no-install-recommends slurm-wlm slurmctld slurmd munge slurm-client
#   echo "127.0.0.1 n1 n2" >> /etc/hosts     # JAX's coordinator is the first node's name; not for task, array and sweep
# One task, an array, a task a node with two devices, a task a device on two nodes; a job that is
# requeued by hand and one that a partition of higher priority preempts: all must finish. One whose time
# is limited must go on after its first end, and stay cancelled when it is cancelled then. Prints how each start
# ended, processes and devices, and the last loss, which is one and the same for the first four.
# By submit.py and configs/launch/slurm.sh: a sweep (METHODS, SEEDS) as an array of three tasks, one of which is killed (kill -9) and one preempted;
# each run must be begun once, go on where it was, and come to the numbers of a local sweep (COMPARE= leaves it
# out), and one report be made; and one training on two nodes, which is preempted.
# CASES="task sweep" takes only these. Takes about 15 minutes, and ends what it started; KEEP=DIR keeps its files there.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
CASES=${CASES:-task array nodes devices requeue preempt limit sweep long}
for name in $CASES; do
  [[ " task array sweep " == *" $name "* ]] || getent hosts n1 n2 > /dev/null ||
    { echo "error: n1 and n2 do not resolve, which $name needs; see the head of $0" >&2; exit 1; }
done
D=$(mktemp -dt alibi-slurm.XXXXXX)
PORT=$((20000 + $$ % 4000 * 3))  # another one's Slurm may run beside this
export SLURM_CONF=$D/slurm.conf JAX_PLATFORMS=cpu ALIBI_CACHE=$D/cache PYTHONPATH=$PWD
daemons=()  # in sessions of their own: what stops this script, as Ctrl-C, reaches them only by `cleanup`
cleanup() {
  timeout 10 scancel --user="$USER" 2> /dev/null || true
  for _ in {1..40}; do  # what a job has started ends before the daemons that see to it
    [ -n "$(timeout 10 squeue --noheader 2> /dev/null)" ] || break
    sleep 1
  done
  for pid in "${daemons[@]}"; do kill "$pid" 2> /dev/null || true; done
  wait
  [ -z "${KEEP:-}" ] || cp -r "$D" "$KEEP"
  rm -rf "$D"
}
USER=$(id -un)
trap cleanup EXIT

mkdir -m 700 "$D/munge"
mkdir "$D/state"
head -c 128 /dev/urandom > "$D/munge/key"
chmod 400 "$D/munge/key"
cat > "$D/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
AuthInfo=socket=$D/munge/socket,cred_expire=5
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool.%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
NodeName=n[1-2] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[$((PORT + 1))-$((PORT + 2))] CPUs=2 RealMemory=2000
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF
CONF
echo "CgroupPlugin=cgroup/v1" > "$D/cgroup.conf"
setsid munged --foreground --force --key-file="$D/munge/key" --socket="$D/munge/socket" --pid-file="$D/munge/pid" \
  --log-file="$D/munge/log" --seed-file="$D/munge/seed" > "$D/munge/said" 2>&1 & daemons+=($!)
sleep 1
setsid slurmctld -D -f "$SLURM_CONF" -i > "$D/slurmctld.log" 2>&1 & daemons+=($!)
for name in n1 n2; do setsid slurmd -D -N "$name" > "$D/slurmd.$name.log" 2>&1 & daemons+=($!); done
until [ "$(sinfo --noheader --format=%T --partition=low 2> /dev/null)" = idle ]; do sleep 1; done

# A job's script, as docs/training.md gives it; the rest of its arguments goes to srun.
cat > "$D/job.sh" <<'JOB'
#!/bin/bash
trap : TERM
srun --kill-on-bad-exit=0 $TASKS .venv/bin/python train.py --config=configs/quickstart.py:position=alibi,length=32 \
  --config.train.steps=${STEPS:-40} --config.train.batch_tokens=1024 --config.model.num_layers=1 --config.model.width=32 \
  --config.model.num_heads=2 --config.model.feed_forward=64 --config.optimizer.warmup_steps=5 --config.log.every_steps=5 \
  --config.log.tensorboard=False --config.checkpoint.every_steps=1000000 --config.data.valid= $FLAGS --workdir=$RUN$SLURM_ARRAY_TASK_ID
code=$?
echo "ended with $code"
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
if [ $code -eq 75 ] || [ $code -eq 129 ] || [ $code -gt 130 ]; then
  # Not where Slurm ends the job itself: it requeues what it preempts, and what was cancelled is to stay so.
  [ "$(squeue --noheader --format=%t --job=$job)" != R ] || scontrol requeue $job
fi
JOB

submit() {  # NAME SBATCH-FLAGS...; TASKS, FLAGS and STEPS are srun's flags, train.py's, and the updates
  local name=$1
  shift
  RUN=$D/runs/$name sbatch --parsable --requeue --open-mode=append --output="$D/$name.log" --ntasks=1 "$@" "$D/job.sh"
}
state() { sed -n 's/.*"state": "\(.*\)".*/\1/p' "$D/runs/$1/status.json" 2> /dev/null || true; }
step() { sed -n 's/.*"step": \([0-9]*\).*/\1/p' "$D/runs/$1/status.json" 2> /dev/null || true; }
await() {  # SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $end ] || { echo "waited in vain: $*" >&2; tail -n 30 "$D"/*.log >&2; exit 1; }
    sleep 1
  done
}
finished() { [ "$(state "$1")" = finished ]; }
past() { [ "$(step "$1")" -ge "$2" ] 2> /dev/null; }
ended() { [ -z "$(squeue --noheader --job="$1" 2> /dev/null)" ]; }

given() { squeue --noheader --array --format="$2" --job="$1" 2> /dev/null || true; }  # JOB FORMAT: of each task
saved() { ls -d "$D/runs/$1/runs/$2/checkpoints"/[0-9]* > /dev/null 2>&1; }

# A model that trains in seconds.
TINY=train_length=32,train.batch_tokens=1024,model.num_layers=1,model.width=32,model.num_heads=2,model.feed_forward=64
TINY=$TINY,optimizer.warmup_steps=5,log.every_steps=5,log.tensorboard=False,eval.every_steps=0
sweep() {  # NAME: the sweep that is also trained undisturbed, in $D/runs/whole
  cat > "$D/sweep.py" <<SWEEP
def get_sweep():
    product = {"position": "${METHODS:-alibi sinusoidal}".split(), "seed": list(range(${SEEDS:-3}))}
    config = "configs/quickstart.py:$TINY,train.steps=${STEPS},checkpoint.every_steps=50"
    return {"config": config, "product": product, "multiples": [1, 2]}
SWEEP
  local python=$PWD/.venv/bin/python runs victim node job high
  $python scripts/submit.py --template=configs/launch/slurm.sh --set=CPUS=1 --sweep="$D/sweep.py" --workdir="$D/runs/sweep" --tasks=3 \
    --set=TIME=60 --set=GRACE=20 --go > "$D/submit.log"
  job=$(sed -n 's/^Submitted batch job //p' "$D/submit.log")
  runs=($($python -c "import json; print(*json.load(open('$D/runs/sweep/sweep.json'))['runs'])"))
  # Each task has begun with the run of its number: the one that is alone on its node is preempted, another one killed.
  for number in 0 1 2; do await 600 saved sweep "${runs[$number]}"; done
  node=$(given "$job" %N | sort | uniq -c | awk '$1 == 1 {print $2; exit}')
  victim=$(squeue --noheader --array --format="%K %N" --job="$job" | awk -v node="$node" '$2 != node {print $1; exit}')
  kill -KILL "$(pgrep -f "^$python $PWD/scripts/sweep.py .*--workdir=$D/runs/sweep --task=$victim/3")"
  high=$(sbatch --parsable --partition=high --nodelist="$node" --cpus-per-task=2 --output=/dev/null --wrap="sleep 5")
  await 120 ended "$high"
  await 1800 ended "$job"
  if [ -n "${COMPARE-yes}" ]; then
    $python scripts/sweep.py --jobs=2 --sweep="$D/sweep.py" --workdir="$D/runs/local" > "$D/local.log" 2>&1
  fi
  "$python" - "$D/runs/sweep" "$D/runs/local" <<'CHECK'
import collections, json, pathlib, re, sys

workdir = pathlib.Path(sys.argv[1])
runs = list(json.loads((workdir / "sweep.json").read_text())["runs"])
logs = "".join(log.read_text() for log in workdir.glob("slurm/*.log"))
starts = collections.Counter(re.findall(r"\] (\S+): training; ", logs))
resumed = collections.Counter(re.findall(r"\] (\S+): training from update", logs))
assert all(starts[run] == 1 for run in runs), f"begun {starts}"
assert sum(resumed.values()) == 2, f"a killed and a preempted run go on: {resumed}"
for run in runs:
    metrics = map(json.loads, (workdir / "runs" / run / "metrics.jsonl").open())
    steps = [row["step"] for row in metrics if "train_nll" in row]
    assert steps == sorted(set(steps)), f"{run}: an update twice"
    assert json.loads((workdir / "runs" / run / "status.json").read_text())["state"] == "finished"
def nll(folder):
    rows = [json.loads(line) for line in (folder / "results.jsonl").open()]
    found = {(row["run"], row["cell"]["length"]): row["results"]["nll_nats"] for row in rows}
    assert len(found) == len(rows) == 2 * len(runs)
    return found
rows, local = nll(workdir), pathlib.Path(sys.argv[2])
compared = local.exists()
if compared:  # on another number of cores, which add in another order
    assert all(abs(there / rows[cell] - 1) < 1e-3 for cell, there in nll(local).items()), "other numbers than local ones"
assert (workdir / "report.md").exists() and (workdir / "extrapolation.png").exists()
codes = collections.Counter(re.findall(r"^ended with exit code (\d+)", logs, re.M))
ended = ", ".join(f"{times} x {code}" for code, times in sorted(codes.items(), key=lambda one: int(one[0])))
alike = ", as of a local sweep" if compared else ""
print(f"sweep: {len(runs)} runs begun once, {sum(resumed.values())} went on, {len(rows)} rows{alike}, 1 report; ended with {ended}")
CHECK
}

long=(--nodes=2 --ntasks=2 --ntasks-per-node=1)
export TASKS="" FLAGS="" STEPS=40
for name in $CASES; do
  runs=$name
  if [ "$name" = sweep ]; then
    STEPS=800 sweep
    continue
  fi
  case $name in
    task) job=$(submit task) ;;
    array) job=$(submit array --array=0-1) runs="array0 array1" ;;
    nodes) job=$(JAX_NUM_CPU_DEVICES=2 FLAGS=--multihost submit nodes "${long[@]}") ;;
    devices) job=$(JAX_NUM_CPU_DEVICES=1 FLAGS=--multihost submit devices --nodes=2 --ntasks=4 --ntasks-per-node=2) ;;
    requeue | preempt) job=$(STEPS=2000 FLAGS=--multihost submit "$name" "${long[@]}") ;;
    long)
      .venv/bin/python scripts/submit.py --template=configs/launch/slurm.sh --set=CPUS=1 --workdir="$D/runs/long" --set=NODES=2 \
        --config="configs/quickstart.py:$TINY,train.steps=2000,position=alibi" --set=TIME=60 --set=GRACE=20 --go > "$D/submit.log"
      job=$(sed -n 's/^Submitted batch job //p' "$D/submit.log")
      ;;
    limit) job=$(STEPS=1000000 FLAGS=--multihost submit limit "${long[@]}" --time=1 --signal=TERM@20) ;;
  esac
  [[ " requeue preempt long " != *" $name "* ]] || await 600 past "$name" 5
  [ "$name" != requeue ] || scontrol requeue "$job"
  [[ " preempt long " != *" $name "* ]] || sbatch --partition=high --nodes=2 --exclusive --output=/dev/null --wrap="sleep 5" > /dev/null
  if [ "$name" = limit ]; then
    await 600 grep -qs "going on from" "$D/limit.log"
    scancel "$job"
  else
    for run in $runs; do await 900 finished "$run"; done
  fi
  await 60 ended "$job"
  about=$(grep -ho '"\(process\|device\)_count": [0-9]*' "$D/runs/${runs%% *}/provenance.json" | tr -d '"' | tr '\n' ' ')
  loss=$(grep -o '"train_nll": [0-9.]*' "$D/runs/${runs%% *}/metrics.jsonl" | tail -n 1 | tr -d '"')
  echo "$name: $about$loss; $(grep -h '^ended with\|^stopped\|^error\|Traceback' "$D"/"$name"*.log "$D/runs/$name"/slurm/*.log 2> /dev/null | sort | uniq -c | tr -s ' \n' ' ')"
done
