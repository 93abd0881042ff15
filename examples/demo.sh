#!/usr/bin/env bash
# Generates data from a known click model, trains CTR-DNN on it with 2 servers and 2 workers, and compares the AUC
# with the best possible one.
set -euo pipefail
rows=${ROWS:-400000}

echo "== writing $rows rows with a planted click model to data/demo"
ps-data generate data/demo --rows "$rows" --test-rows 40000 --files 4 --seed 1

echo "== training: 2 servers, 2 workers, asynchronous (logs in log/)"
ps-launch --server-num 2 --worker-num 2 --json examples/demo.toml | tee output.json.partial | sed '$d'
result=$(tail -n 1 output.json.partial)
rm output.json.partial

echo "== result"
python - "$result" <<'PYTHON'
import json, pathlib, sys

result = json.loads(sys.argv[1])
best = json.loads(pathlib.Path("data/demo/planted.json").read_text())["best_auc"]
print(f"AUC on rows kept aside   {result['auc']:.4f}")
print(f"best possible AUC        {best:.4f}")
print(f"log loss                 {result['log_loss']:.4f}")
print(f"examples/s               {result['examples_per_s']:,.0f}")
print(f"model                    {result['checkpoint']}")
PYTHON
echo "== next: .venv/bin/ps-worker infer --model output/demo --data 'data/demo/test/part-*'"
