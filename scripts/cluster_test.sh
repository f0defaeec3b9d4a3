#!/usr/bin/env bash
# Trains small runs on a Slurm of two nodes that are both this machine: bash scripts/cluster_test.sh
#
# Needs root, and, as on Debian,
#   apt-get install --no-install-recommends slurm-wlm slurmctld slurmd munge slurm-client
#   echo "127.0.0.1 n1 n2" >> /etc/hosts     # JAX's coordinator is the first node's name
# One task, an array, a task a node with two devices, a task a device on two nodes; a job that is
# requeued by hand and one that a partition of higher priority preempts: all must finish. One whose time
# is limited must go on after its first end, and stay cancelled when it is cancelled then. Prints how each start ended, processes and devices, and the last loss, which is one and the same
# for the first four. CASES="task nodes" takes only these. Takes about ten minutes, and ends what it started.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for name in n1 n2; do
  getent hosts "$name" > /dev/null || { echo "error: $name does not resolve; see the head of $0" >&2; exit 1; }
done
D=$(mktemp -dt alibi-slurm.XXXXXX)
export SLURM_CONF=$D/slurm.conf JAX_PLATFORMS=cpu ALIBI_CACHE=$D/cache PYTHONPATH=$PWD
daemons=()
cleanup() {
  scancel --user="$USER" 2> /dev/null || true
  sleep 2
  for pid in "${daemons[@]}"; do kill "$pid" 2> /dev/null || true; done
  wait
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
SlurmctldPort=16817
SlurmUser=root
AuthInfo=socket=$D/munge/socket
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
NodeName=n[1-2] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[16821-16822] CPUs=2 RealMemory=2000
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF
CONF
echo "CgroupPlugin=cgroup/v1" > "$D/cgroup.conf"
munged --foreground --force --key-file="$D/munge/key" --socket="$D/munge/socket" --pid-file="$D/munge/pid" \
  --log-file="$D/munge/log" --seed-file="$D/munge/seed" > "$D/munge/said" 2>&1 & daemons+=($!)
sleep 1
slurmctld -D -f "$SLURM_CONF" -i > "$D/slurmctld.log" 2>&1 & daemons+=($!)
for name in n1 n2; do slurmd -D -N "$name" > "$D/slurmd.$name.log" 2>&1 & daemons+=($!); done
until [ "$(sinfo --noheader --format=%T --partition=low 2> /dev/null)" = idle ]; do sleep 1; done

# A job's script, as README gives it: the rest of its arguments are those of srun.
cat > "$D/job.sh" <<'JOB'
#!/bin/bash
trap : TERM
srun --kill-on-bad-exit=0 $TASKS .venv/bin/python train.py --config=configs/quickstart.py:position=alibi,length=32 \
  --config.train.steps=${STEPS:-40} --config.train.batch_tokens=1024 --config.model.num_layers=1 --config.model.width=32 \
  --config.model.num_heads=2 --config.model.feed_forward=64 --config.optimizer.warmup_steps=5 --config.log.every_steps=5 \
  --config.log.tensorboard=False --config.checkpoint.every_steps=1000000 --config.data.valid= $FLAGS --workdir=$RUN$SLURM_ARRAY_TASK_ID
code=$?
echo "ended with $code"
if [ $code -eq 75 ] || [ $code -gt 130 ]; then
  # Not where Slurm ends the job itself: it requeues what it preempts, and what was cancelled is to stay so.
  [ "$(squeue --noheader --format=%t --job=$SLURM_JOB_ID)" != R ] || scontrol requeue $SLURM_JOB_ID
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

long=(--nodes=2 --ntasks=2 --ntasks-per-node=1)
export TASKS="" FLAGS="" STEPS=40
for name in ${CASES:-task array nodes devices requeue preempt limit}; do
  runs=$name
  case $name in
    task) job=$(submit task) ;;
    array) job=$(submit array --array=0-1) runs="array0 array1" ;;
    nodes) job=$(JAX_NUM_CPU_DEVICES=2 FLAGS=--multihost submit nodes "${long[@]}") ;;
    devices) job=$(JAX_NUM_CPU_DEVICES=1 FLAGS=--multihost submit devices --nodes=2 --ntasks=4 --ntasks-per-node=2) ;;
    requeue | preempt) job=$(STEPS=2000 FLAGS=--multihost submit "$name" "${long[@]}") ;;
    limit) job=$(STEPS=1000000 FLAGS=--multihost submit limit "${long[@]}" --time=1 --signal=TERM@20) ;;
  esac
  if [ "$name" = requeue ] || [ "$name" = preempt ]; then await 300 past "$name" 5; fi
  [ "$name" != requeue ] || scontrol requeue "$job"
  [ "$name" != preempt ] || sbatch --partition=high --nodes=2 --exclusive --output=/dev/null --wrap="sleep 5" > /dev/null
  if [ "$name" = limit ]; then
    await 600 grep -qs "going on from" "$D/limit.log"
    scancel "$job"
  else
    for run in $runs; do await 900 finished "$run"; done
  fi
  await 60 ended "$job"
  about=$(grep -ho '"\(process\|device\)_count": [0-9]*' "$D/runs/${runs%% *}/provenance.json" | tr -d '"' | tr '\n' ' ')
  loss=$(grep -o '"train_nll": [0-9.]*' "$D/runs/${runs%% *}/metrics.jsonl" | tail -n 1 | tr -d '"')
  echo "$name: $about$loss; $(grep -h '^ended with\|^stopped\|^error\|Traceback' "$D"/"$name"*.log | sort | uniq -c | tr -s ' \n' ' ')"
done
