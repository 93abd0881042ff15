"""One script for servers and workers, as in PaddlePaddle's Fleet (docs/fleet.md).

    fleet.init()
    executor = fleet.distributed_optimizer(fleet.optimizer.Adagrad(learning_rate=0.02)).minimize(model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        executor.train_from_dataset(dataset)
        fleet.stop_worker()

`ps-launch --server-num 1 --worker-num 2 script.py` runs it as a cluster on this machine, `python script.py`
alone in one process.
"""

from ctr_ps.ps_worker.data.user_code.data_generator import (
    MultiSlotDataGenerator,
    MultiSlotStringDataGenerator,
)
from ctr_ps.ps_worker.data.user_code.samples import SampleLoader
from ctr_ps.ps_worker.fleet import metrics, optimizer, util
from ctr_ps.ps_worker.fleet.executor import DistributedOptimizer, Executor, distributed_optimizer
from ctr_ps.ps_worker.fleet.running import FLEET
from ctr_ps.ps_worker.fleet.words.datasets import DatasetFactory, InMemoryDataset, QueueDataset
from ctr_ps.ps_worker.fleet.words.roles import (
    PaddleCloudRoleMaker,
    Role,
    RoleMaker,
    UserDefinedRoleMaker,
)
from ctr_ps.ps_worker.fleet.words.strategy import DistributedStrategy
from ctr_ps.ps_worker.training.monitor import Fetched

__all__ = [
    "DatasetFactory",
    "DistributedOptimizer",
    "DistributedStrategy",
    "Executor",
    "Fetched",
    "InMemoryDataset",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "PaddleCloudRoleMaker",
    "QueueDataset",
    "Role",
    "RoleMaker",
    "SampleLoader",
    "UserDefinedRoleMaker",
    "barrier_worker",
    "data_position",
    "distributed_optimizer",
    "file_splits",
    "init",
    "init_heter_worker",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_heter_worker",
    "is_server",
    "is_worker",
    "load_model",
    "metrics",
    "optimizer",
    "peers",
    "run_heter_worker",
    "run_server",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "shrink",
    "split_files",
    "stop_worker",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

barrier_worker = FLEET.barrier_worker
data_position = FLEET.data_position
init = FLEET.init
init_heter_worker = FLEET.init_heter_worker
init_server = FLEET.init_server
init_worker = FLEET.init_worker
is_first_worker = FLEET.is_first_worker
is_heter_worker = FLEET.is_heter_worker
is_server = FLEET.is_server
is_worker = FLEET.is_worker
load_model = FLEET.load_model
peers = FLEET.peers
run_heter_worker = FLEET.run_heter_worker
run_server = FLEET.run_server
save_inference_model = FLEET.save_inference_model
save_persistables = FLEET.save_persistables
server_endpoints = FLEET.server_endpoints
server_index = FLEET.server_index
server_num = FLEET.server_num
shrink = FLEET.shrink
split_files = FLEET.split_files
file_splits = FLEET.file_splits
stop_worker = FLEET.stop_worker
worker_endpoints = FLEET.worker_endpoints
worker_index = FLEET.worker_index
worker_num = FLEET.worker_num
