#!/bin/bash
# A sweep or one training on Slurm. Copy this file and change it as your cluster needs; scripts/submit.py fills the
# names in double braces, behind "=" stands a default:
#   python scripts/submit.py --template=configs/launch/slurm.sh --sweep=FILE.py --workdir=DIR --set=TIME=4:00:00 \
#     --set=OPTIONS="--partition=gpu --gpus-per-node=1" --go
# The nodes must see this clone, its Python, the sweep or config file, and the work directory.
#SBATCH --job-name={{NAME}}
#SBATCH --array=0-{{LAST_TASK}}%{{AT_ONCE=1000}}
#SBATCH --nodes={{NODES=1}} --ntasks-per-node=1 --cpus-per-task={{CPUS=8}} {{OPTIONS=}}
#SBATCH --time={{TIME}}
#SBATCH --signal=TERM@{{GRACE=120}}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{{LOGS}}/%x-%A_%a.log"

TASK=$SLURM_ARRAY_TASK_ID
[ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ] && multihost=--multihost || multihost=
# srun does not take it from sbatch
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
trap : TERM  # the command answers SIGTERM, not this shell
srun --kill-on-bad-exit=0 {{COMMAND}} $multihost
code=$?
echo "ended with exit code $code" >&2
# The last task of an array has the job number of the whole array.
job=${SLURM_ARRAY_JOB_ID}_$TASK
# 75: stopped by a signal, with all work saved. From 129 on: killed by a signal; 130 is a user's Ctrl-C.
if { [ $code -eq 75 ] || [ $code -eq 129 ] || [ $code -gt 130 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt {{RESTARTS=100}} ]
then
  # Only a running job: Slurm itself requeues a preempted one, and a cancelled one stays cancelled.
  [ "$(squeue --noheader --format=%t --job=$job)" != R ] || scontrol requeue $job
fi
exit $code
