"""From a DataFrame to a compared, explained and served model, cell by cell: `python examples/first_model.py`.

An editor that knows `# %%` (VS Code, PyCharm, Spyder, Jupytext) runs the cells one by one. It needs pandas
and the extra `serve`, and takes less than a minute.
"""

# %% Clicks of a week: a user clicks on items of a kind that suits the user, and less on a phone.
import json
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import pandas as pd

from ctr_ps import Predictor, Trainer

rng = np.random.default_rng(1)
N = 20_000
user, item = rng.zipf(1.2, (2, N)) % 500
phone = rng.random(N) < 0.6
suits = user % 3 == item % 3
rate = 1 / (1 + np.exp(-(-2.5 + 2.5 * suits - 0.7 * phone)))
clicks = pd.DataFrame(
    {
        "day": np.sort(rng.integers(1, 8, N)),
        "user": "u" + pd.Series(user).astype(str),
        "item": "i" + pd.Series(item).astype(str),
        "device": np.where(phone, "phone", "desktop"),
        "price": np.round(rng.lognormal(3, 1, N), 2),
        "label": (rng.random(N) < rate).astype(int),
    }
)
print(clicks.tail(3))

# %% The future is what counts: train on five days, choose by the sixth, test on the seventh.
columns = clicks.drop(columns="day")
train, valid, test = (columns[each] for each in (clicks.day <= 5, clicks.day == 6, clicks.day == 7))

# %% Compare models by the day to choose by. (From files: ps-worker compare job.toml --models lr,fm,deepfm)
trained = {}
for model, options in (("lr", {}), ("fm", {"dim": 8}), ("deepfm", {"dim": 8, "hidden": [32]})):
    trainer = Trainer.from_frame(train, model, options, train={"batch_size": 256})
    done = trainer.train(train, valid=valid, epochs=5, patience=1, final_model="best")
    best = min(each.log_loss for each in done.validations)
    trained[model] = (best, trainer)
    print(f"{model:8} log loss {best:.4f} of the best of {len(done.validations)} epochs")
name, (_, trainer) = min(trained.items(), key=lambda each: each[1][0])

# %% How good is it on the day that nothing was chosen by?
figures = trainer.evaluate(test)
print(f"{name}: AUC {figures['auc']:.4f}, log loss {figures['log_loss']:.4f}", end="; ")
print(
    f"the click rate alone {figures['base_log_loss']:.4f}, calibration {figures['calibration']:.3f}"
)

# %% What does it know? The loss in AUC when the values of a column are permuted.
for each in trainer.importance(test).features:
    print(f"{each.name:8} {each.auc_lost:.4f}")

# %% Save it, and predict in another program: columns by name, no label.
folder = Path(tempfile.mkdtemp()) / "model"
trainer.save(folder)
predictor = Predictor.load(folder)
probabilities = predictor.predict(test.drop(columns="label").head(5))
print(probabilities)

# %% Or serve it; in production with tokens, docs/serving.md.
server = subprocess.Popen(
    ["ps-serve", folder, "--http", "127.0.0.1:0", "--grpc", ""], stderr=subprocess.PIPE, text=True
)
try:
    address = next(line.split()[-1] for line in server.stderr if "HTTP at" in line)
    rows = test.head(5)
    tensors = [
        {"name": name, "datatype": kind, "shape": [5], "data": rows[name].tolist()}
        for name, kind in (
            ("user", "BYTES"),
            ("item", "BYTES"),
            ("device", "BYTES"),
            ("price", "FP32"),
        )
    ]
    body = json.dumps({"inputs": tensors}).encode()
    with urllib.request.urlopen(
        f"http://{address}/v2/models/ctr/infer", body, timeout=30
    ) as answer:
        served = json.load(answer)["outputs"][0]["data"]
    print("served alike:", np.allclose(served, probabilities))
finally:
    server.terminate()
    server.communicate(timeout=30)
