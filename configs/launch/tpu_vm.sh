#!/usr/bin/env bash
# A sweep or one training on TPU VMs without Kubernetes: one queued resource of Google Cloud for each task, which runs
# it as soon as there is a slice. Not run on TPUs yet. Copy this file and change it as you need; scripts/submit.py
# fills the names in double braces, behind "=" stands a default:
#   python scripts/submit.py --template=configs/launch/tpu_vm.sh --config=FILE.py --workdir=gs://BUCKET/DIR \
#     --set=REPOSITORY=https://... --set=PROJECT=PROJECT --set=ZONE=us-west4-a --set=ACCELERATOR=v5litepod-16 --go
# Logs: sudo journalctl -u google-startup-scripts, on a host. A slice stays when its task has ended, and costs money
# until: gcloud compute tpus queued-resources delete alibi-NAME-TASK --force
# A spot slice that is taken back goes on when this is submitted again after that.
set -e
startup=$(mktemp)
cat > "$startup" <<'STARTUP'
#!/usr/bin/env bash
cd /root
[ -d alibi ] || git clone {{REPOSITORY}} alibi
command -v python3.11 || { apt-get update && apt-get -o DPkg::Lock::Timeout=600 install -y python3.11-venv; }
export ALIBI_PROCESS_ID=$(curl -sfH Metadata-Flavor:Google \
  http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)
cd alibi && git checkout {{COMMIT=HEAD}} && bash scripts/setup.sh --extra=tpu --extra=gcs && source .venv/bin/activate
TASK={{TASK}}
for start in $(seq 0 {{RESTARTS=100}}); do
  {{CLONE_COMMAND}} --multihost
  code=$?
  echo "ended with exit code $code"
  # 75: stopped by a signal, with all work saved. From 129 on: killed by a signal; 130 is Ctrl-C.
  [ $code -eq 75 ] || [ $code -eq 129 ] || [ $code -gt 130 ] || break
done
STARTUP
gcloud compute tpus queued-resources create alibi-{{NAME}}-{{TASK}} --node-id=alibi-{{NAME}}-{{TASK}} \
  --project={{PROJECT}} --zone={{ZONE}} --accelerator-type={{ACCELERATOR}} \
  --runtime-version={{RUNTIME=v2-alpha-tpuv5-lite}} --metadata-from-file=startup-script="$startup" {{OPTIONS=}}
rm "$startup"
