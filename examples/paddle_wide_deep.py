"""Wide & deep as a static program of PaddlePaddle: only the imports differ from a script for Paddle.

python examples/paddle_wide_deep.py 'criteo/part-*'
ps-launch --server-num 1 --worker-num 2 examples/paddle_wide_deep.py 'criteo/part-*'
"""

import math
import sys
import zlib

from ctr_ps import fleet, matching_files, paddle

paddle.enable_static()


class Reader(fleet.MultiSlotDataGenerator):
    """Rows in Criteo's layout: label, 13 numbers and 26 texts, separated by tabs."""

    def generate_sample(self, line):
        """Returns a function that yields a row's columns, in the order of the variables."""

        def columns():
            label, *values = line.rstrip("\n").split("\t")
            numbers = [math.log1p(max(float(each), 0.0)) if each else 0.0 for each in values[:13]]
            slots = [[zlib.crc32(each.encode()) % 1_000_001] for each in values[13:]]
            names = [f"C{number}" for number in range(1, 27)]
            yield [
                ("dense_input", numbers),
                *zip(names, slots, strict=True),
                ("click", [int(label)]),
            ]

        return columns


def net(dense_input, slots, click):
    """Returns the loss of wide & deep."""

    def embedding(slot):
        return paddle.static.nn.sparse_embedding(
            input=slot,
            size=[1_000_001, 10],
            param_attr=paddle.ParamAttr(
                name="embedding", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01)
            ),
        )

    deep = paddle.concat([*map(embedding, slots), dense_input], axis=1)
    for size in (400, 400, 400):
        deep = paddle.static.nn.fc(x=deep, size=size, activation="relu")
    wide = paddle.static.nn.fc(x=dense_input, size=1)
    both = paddle.concat([deep, wide], axis=1)
    predict = paddle.static.nn.fc(x=both, size=2, activation="softmax")
    return paddle.mean(paddle.nn.functional.cross_entropy(input=predict, label=click))


def main() -> None:
    """Runs the script in the role of this process."""
    fleet.init(fleet.PaddleCloudRoleMaker())
    dense_input = paddle.static.data("dense_input", [None, 13], "float32")
    slots = [paddle.static.data(f"C{i}", [None, 1], "int64", lod_level=1) for i in range(1, 27)]
    click = paddle.static.data("click", [None, 1], "int64")
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.01), strategy)
    optimizer.minimize(net(dense_input, slots, click))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    dataset = fleet.DatasetFactory().create_dataset("QueueDataset")
    command = f"{sys.executable} {__file__} --read"
    dataset.init(use_var=[dense_input, *slots, click], pipe_command=command, batch_size=128)
    dataset.set_filelist(fleet.util.get_file_shard(matching_files(sys.argv[1])))
    executor.train_from_dataset(paddle.static.default_main_program(), dataset)
    metrics = executor.infer_from_dataset(paddle.static.default_main_program(), dataset)
    print(f"AUC {metrics.auc():.4f} log_loss {metrics.log_loss():.4f}")
    if fleet.is_first_worker():
        fleet.save_persistables(executor, "output/paddle_wide_deep")
    fleet.stop_worker()


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        Reader().run_from_stdin()
    else:
        main()
