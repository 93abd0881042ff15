"""Models of torch-rechub, deepctr-torch and fuxictr as their own code makes them, and rows of their shapes.

Three modules are replaced while they are imported: h5py and `fuxictr.preprocess.build_dataset`, which
only its reading of files needs, and `deepctr_torch.utils`, which asks PyPI for a newer version.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 16
VOCABULARY = 20  # ids of each column; 0 is padding where a model has any
LENGTH = 6  # of a history
DIM = 8

Batch = Any
"""As the model takes it: a dictionary by column, a matrix, or a tuple of these."""

PACKAGES = {"torch-rechub": "torch_rechub", "deepctr-torch": "deepctr_torch", "fuxictr": "fuxictr"}


@dataclass(frozen=True)
class Case:
    """A model, how batches of it are made, and which loss its output has."""

    package: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Tensor], Tensor]

    def model(self, seed: int) -> nn.Module:
        """Returns a new model whose embeddings are large enough for the loss to depend on them."""
        torch.manual_seed(seed)
        model = self.build()
        torch.manual_seed(seed)  # some set a seed of their own
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    nn.init.normal_(module.weight, std=0.3)
                    if module.padding_idx is not None:
                        module.weight[module.padding_idx].zero_()
        return model

    def batches(self, number: int) -> list[tuple[Batch, Tensor]]:
        """Returns the same batches with their labels float32[B] at each call."""
        random = torch.Generator().manual_seed(7)
        return [
            (self.batch(random), torch.randint(2, (BATCH,), generator=random).float())
            for _ in range(number)
        ]


def ids(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, *shape), generator=random)


def padded(random: torch.Generator) -> Tensor:
    """Returns histories [B, LENGTH] of 2 ids at least, padded behind by 0; the first is full."""
    lengths = torch.randint(2, LENGTH + 1, (BATCH, 1), generator=random)
    lengths[0] = LENGTH
    return ids(random, LENGTH) * (torch.arange(LENGTH) < lengths)


def numbers(random: torch.Generator) -> Tensor:
    return torch.rand(BATCH, generator=random)


# Losses


def of_probabilities(output: Any, labels: Tensor) -> Tensor:
    """The log loss of one or several tasks; a second output is a loss of the model's own."""
    extra = 0.0
    if isinstance(output, tuple):
        output, extra = output
    if isinstance(output, dict):
        output = output["y_pred"]
    output = output.reshape(len(labels), -1)
    return functional.binary_cross_entropy(output, labels[:, None].expand_as(output)) + extra


def of_scores(output: Any, labels: Tensor) -> Tensor:
    """The softmax loss of scores [B, C], of which the first, or the label's, is right."""
    output = output.reshape(-1, output.shape[-1])
    return functional.cross_entropy(output, labels.long()[:1].expand(len(output)))


def of_pairs(output: Any, labels: Tensor) -> Tensor:
    """The loss of scores of a right and a wrong item."""
    right, wrong = output
    return -functional.logsigmoid(right - wrong).mean()


# torch-rechub


def _rechub() -> Iterator[Case]:
    features = import_module("torch_rechub.basic.features")
    ranking = import_module("torch_rechub.models.ranking")
    matching = import_module("torch_rechub.models.matching")
    tasks = import_module("torch_rechub.models.multi_task")
    generative = import_module("torch_rechub.models.generative")

    def sparse(*names: str, dim: int = DIM, vocabulary: int = VOCABULARY) -> list[Any]:
        return [features.SparseFeature(name, vocabulary, dim) for name in names]

    def dense() -> list[Any]:
        return [features.DenseFeature("price")]

    def history(name: str = "hist", pooling: str = "concat", item: str | None = "item") -> Any:
        shared = {"shared_with": item} if item else {"padding_idx": 0}
        return features.SequenceFeature(name, VOCABULARY, DIM, pooling=pooling, **shared)

    def batch(random: torch.Generator) -> Batch:
        columns = {
            name: ids(random) for name in ("user", "city", "item", "shop", "other", "weight")
        }
        columns |= {"price": numbers(random), "negatives": ids(random, 3)}
        return columns | {
            name: padded(random) for name in ("hist", "not_hist", "seq", "pos", "neg")
        }

    mlp = {"dims": [16, 8], "dropout": 0.1, "activation": "relu"}
    tower = {"dims": [16, DIM], "dropout": 0.0, "activation": "relu"}
    two = ["classification", "classification"]
    fields = partial(sparse, "user", "city", "item")

    def make(of: Any, name: str, loss: Any, **arguments: Callable[[], Any]) -> Case:
        def build() -> nn.Module:
            return getattr(of, name)(**{each: value() for each, value in arguments.items()})

        return Case("torch-rechub", name, build, batch, loss)

    def value(of: Any) -> Callable[[], Any]:
        return lambda: of

    rank = partial(make, ranking, loss=of_probabilities)
    all_of = lambda: dense() + fields()  # noqa: E731
    sequence = {
        "features": fields,
        "history_features": lambda: [history()],
        "target_features": partial(sparse, "item"),
        "mlp_params": value({"dims": [16, 8], "dropout": 0.0}),
    }
    yield rank("WideDeep", wide_features=dense, deep_features=fields, mlp_params=value(mlp))
    yield rank("DeepFM", deep_features=all_of, fm_features=fields, mlp_params=value(mlp))
    yield rank("DCN", features=all_of, n_cross_layers=value(2), mlp_params=value(mlp))
    yield rank("DCNv2", features=all_of, n_cross_layers=value(2), mlp_params=value(mlp))
    yield rank("EDCN", features=fields, n_cross_layers=value(2), mlp_params=value(mlp))
    yield rank("AFM", fm_features=fields, embed_dim=value(DIM))
    yield rank("FiBiNet", features=fields, mlp_params=value(mlp))
    ffm = {
        "linear_features": partial(sparse, "user", "city", dim=1),
        # a row for each id and each of the three fields
        "cross_features": partial(sparse, "item", "shop", "other", vocabulary=3 * VOCABULARY),
        "embed_dim": value(DIM),
        "mlp_params": value(mlp),
    }
    yield rank("DeepFFM", **ffm)
    yield rank("FatDeepFFM", **ffm, reduction_ratio=value(1))
    yield rank("AutoInt", sparse_features=fields, dense_features=dense, mlp_params=value(mlp))
    yield rank("BST", **{**sequence, "mlp_params": value(mlp)}, nhead=value(2))
    yield rank("DIN", **sequence, attention_mlp_params=value({"dims": [8]}))
    yield rank("DIEN", **sequence, neg_history_features=lambda: [history("not_hist")])

    multi = partial(make, tasks, loss=of_probabilities)
    towers = value([{"dims": [8]}, {"dims": [8]}])
    yield multi(
        "SharedBottom",
        features=all_of,
        task_types=value(two),
        bottom_params=value({"dims": [16]}),
        tower_params_list=towers,
    )
    yield multi(
        "ESMM",
        user_features=partial(sparse, "user", "city"),
        item_features=partial(sparse, "item"),
        cvr_params=value({"dims": [8]}),
        ctr_params=value({"dims": [8]}),
    )
    yield multi(
        "MMOE",
        features=all_of,
        task_types=value(two),
        n_expert=value(2),
        expert_params=value({"dims": [16]}),
        tower_params_list=towers,
    )
    yield multi(
        "PLE",
        features=all_of,
        task_types=value(two),
        n_level=value(1),
        n_expert_specific=value(1),
        n_expert_shared=value(1),
        expert_params=value({"dims": [16]}),
        tower_params_list=towers,
    )
    yield multi(
        "AITM",
        features=all_of,
        n_task=value(2),
        bottom_params=value({"dims": [16, 8]}),
        tower_params_list=towers,
    )

    user = partial(sparse, "user", "city")
    towers_of = {"user_params": value(tower), "item_params": value(tower)}
    match = partial(make, matching)
    listwise = {
        "user_features": user,
        "history_features": lambda: [history()],
        "item_features": partial(sparse, "item"),
        "neg_item_feature": lambda: [history("negatives")],
    }
    of_user = lambda: [*user(), history(pooling="mean", item=None)]  # noqa: E731
    yield match(
        "DSSM",
        loss=of_probabilities,
        user_features=of_user,
        item_features=partial(sparse, "item", "shop"),
        **towers_of,
    )
    yield match(
        "FaceBookDSSM",
        loss=of_pairs,
        user_features=user,
        pos_item_features=partial(sparse, "item"),
        neg_item_features=partial(sparse, "other"),
        **towers_of,
    )
    yield match(
        "YoutubeDNN",
        loss=of_scores,
        user_features=of_user,
        item_features=partial(sparse, "item"),
        neg_item_feature=lambda: [history("negatives")],
        user_params=value(tower),
    )
    yield match(
        "YoutubeSBC",
        loss=of_scores,
        user_features=user,
        item_features=partial(sparse, "item"),
        sample_weight_feature=dense,
        batch_size=value(BATCH),
        **towers_of,
    )
    yield match("MIND", loss=of_scores, **listwise, max_length=value(LENGTH))
    # ComirecDR is left out: it begins with a weight of memory that it does not initialize.
    yield match("ComirecSA", loss=of_scores, **listwise)
    yield match("GRU4Rec", loss=of_scores, **listwise, user_params=value(tower))
    alone = partial(history, item=None)
    yield match(
        "NARM",
        loss=of_scores,
        item_history_feature=alone,
        hidden_dim=value(DIM),
        emb_dropout_p=value(0.1),
        session_rep_dropout_p=value(0.1),
    )
    yield match(
        "STAMP",
        loss=of_scores,
        item_history_feature=alone,
        weight_std=value(0.05),
        emb_std=value(0.1),
    )
    yield match(
        "SINE",
        loss=of_scores,
        history_features=value(["hist"]),
        item_features=value(["item"]),
        neg_item_features=value(["negatives"]),
        num_items=value(VOCABULARY),
        embedding_dim=value(DIM),
        hidden_dim=value(DIM),
        num_concept=value(5),
        num_intention=value(2),
        seq_max_len=value(LENGTH),
    )
    yield match(
        "SASRec",
        loss=of_pairs,
        features=lambda: [
            history("seq", item=None),
            history("pos", item="seq"),
            history("neg", item="seq"),
        ],
        max_len=value(LENGTH),
    )
    for tied in (True, False):
        yield Case(
            "torch-rechub",
            "HSTU" if tied else "HSTU(untied)",
            partial(
                generative.HSTUModel,
                VOCABULARY,
                d_model=16,
                n_heads=2,
                n_layers=1,
                dqk=8,
                dv=8,
                max_seq_len=LENGTH,
                tie_embeddings=tied,
            ),
            lambda random: (padded(random), torch.randint(5000, (BATCH, LENGTH), generator=random)),
            of_scores,
        )


# deepctr-torch


def _deepctr() -> Iterator[Case]:
    inputs = import_module("deepctr_torch.inputs")
    models = import_module("deepctr_torch.models")
    columns = [inputs.SparseFeat(name, VOCABULARY, DIM) for name in ("user", "city", "shop")]
    numbers_of = [inputs.DenseFeat("price", 1)]
    words = inputs.VarLenSparseFeat(
        inputs.SparseFeat("words", VOCABULARY, DIM), LENGTH, "mean", length_name=None
    )
    histories = [inputs.SparseFeat(name, VOCABULARY, DIM) for name in ("user", "item")]
    for name in ("hist_item", "neg_hist_item"):
        feature = inputs.SparseFeat(name, VOCABULARY, DIM, embedding_name="item")
        histories.append(inputs.VarLenSparseFeat(feature, LENGTH, length_name="length"))

    def row(random: torch.Generator, feature: Any) -> Tensor:
        if isinstance(feature, inputs.DenseFeat):
            return numbers(random)[:, None]
        if isinstance(feature, inputs.VarLenSparseFeat):
            return padded(random)
        return ids(random, 1)

    def case(name: str, features: list[Any], options: Mapping[str, Any], label: str = "") -> Case:
        def batch(random: torch.Generator) -> Tensor:
            parts = [row(random, feature) for feature in features]
            if features is histories or features == histories[:3]:
                lengths = torch.randint(2, LENGTH + 1, (BATCH, 1), generator=random)
                parts.insert(3, lengths)  # behind the first history that names it
            return torch.cat([part.float() for part in parts], 1)

        return Case(
            "deepctr-torch",
            label or name,
            partial(getattr(models, name), **options, init_std=0.2),
            batch,
            of_probabilities,
        )

    plain = [*columns, *numbers_of]
    both = {"linear_feature_columns": [*plain, words], "dnn_feature_columns": [*plain, words]}
    small = {"dnn_hidden_units": (16, 8)}
    for name in ("WDL", "DeepFM", "xDeepFM", "DIFM", "IFM", "AutoInt", "DCN", "DCNMix", "FiBiNET"):
        yield case(name, [*plain, words], {**both, **small})
    yield case("NFM", [*plain, words], {**both, **small})
    yield case(
        "AFN", [*plain, words], {**both, "ltl_hidden_size": 8, "afn_dnn_hidden_units": (16, 8)}
    )
    yield case("ONN", plain, dict.fromkeys(both, plain) | small)
    yield case(
        "CCPM", columns, dict.fromkeys(both, columns) | {"conv_kernel_width": (3, 2)} | small
    )
    yield case("AFM", columns, dict.fromkeys(both, columns))
    yield case("MLR", plain, {"region_feature_columns": plain, "region_num": 2})
    yield case(
        "PNN",
        [*plain, words],
        {"dnn_feature_columns": [*plain, words], "use_outter": True, **small},
    )
    listed = {"dnn_feature_columns": histories[:3], "history_feature_list": ["item"], **small}
    yield case("DIN", histories[:3], {**listed, "att_hidden_size": (8, 4), "dnn_use_bn": True})
    yield case("DIEN", histories[:3], {**listed, "gru_type": "AUGRU", "att_hidden_units": (8, 4)})
    negative = {"dnn_feature_columns": histories, "use_negsampling": True, "gru_type": "GRU"}
    yield case("DIEN", histories, {**listed, **negative}, "DIEN(negatives)")
    for name in ("SharedBottom", "ESMM", "MMOE", "PLE"):
        yield case(name, [*plain, words], {"dnn_feature_columns": [*plain, words]})


# fuxictr


def _fuxictr() -> Iterator[Case]:
    feature_map = import_module("fuxictr.features").FeatureMap
    zoo = import_module("model_zoo.LongCTR")

    def columns() -> Any:
        found = feature_map("random", "nowhere")
        of_ids = {"type": "categorical", "vocab_size": VOCABULARY, "padding_idx": 0}
        found.features.update(user={**of_ids, "source": "user"}, city={**of_ids, "source": "user"})
        found.features.update(item={**of_ids, "source": "item"}, shop={**of_ids, "source": "item"})
        found.labels, found.num_fields, found.default_emb_dim = ["click"], 4, DIM
        return found

    def batch(random: torch.Generator) -> Batch:
        users = {name: ids(random) for name in ("user", "city")}
        mask = (padded(random) > 0).float().flip(1)
        # the history, with the candidate behind it, of each example
        whole = torch.cat([mask, torch.ones(BATCH, 1)], 1)
        items = {
            name: (ids(random, LENGTH + 1) * whole).long().flatten() for name in ("item", "shop")
        }
        return users, items, mask

    def build(name: str, options: Mapping[str, Any]) -> nn.Module:
        return getattr(zoo, name)(
            columns(),
            embedding_dim=DIM,
            verbose=0,
            model_root="nowhere",
            metrics=["AUC"],
            optimizer="adam",
            loss="binary_crossentropy",
            **options,
        )

    hidden = {"dnn_hidden_units": [16, 8]}
    short = {**hidden, "attention_dim": 8, "short_seq_len": 3}
    options: dict[str, dict[str, Any]] = {
        "DIN": {**hidden, "attention_hidden_units": [8]},
        "DCNv2": {"parallel_dnn_hidden_units": [16, 8]},
        "DIEN": {**hidden, "attention_hidden_units": [8]},
        "FinalMLP": {"mlp1_hidden_units": [16], "mlp2_hidden_units": [16], "use_fs": False},
        "ETA": {**short, "topk": 3},
        "MIRRN": {**short, "topk": 3, "max_len": LENGTH},
        "TransAct": {"dcn_hidden_units": [16], "dim_feedforward": 16},
        "SIM": {**short, "topk": 3},
        "SDIM": short,
        "TWIN": {**short, "topk": 3},
    }
    for name, own in options.items():
        yield Case("fuxictr", name, partial(build, name, own), batch, of_probabilities)


@contextmanager
def _stand_ins() -> Iterator[None]:
    def empty(name: str, **names: Any) -> None:
        module = ModuleType(name)
        vars(module).update(names)
        sys.modules.setdefault(name, module)
        added.append(name)

    added: list[str] = []
    empty("h5py")
    empty("deepctr_torch.utils", check_version=lambda version: None)
    empty("fuxictr.preprocess.build_dataset")
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


_MAKERS = {"torch-rechub": _rechub, "deepctr-torch": _deepctr, "fuxictr": _fuxictr}


def missing() -> list[str]:
    """Returns the packages that are not installed."""
    return [package for package, module in PACKAGES.items() if find_spec(module) is None]


def cases(package: str) -> dict[str, Case]:
    """Returns the models of an installed package by name."""
    with _stand_ins(), warnings.catch_warnings(action="ignore"):  # of their imports
        return {case.name: case for case in _MAKERS[package]()}


def outputs(model: nn.Module, batch: Batch) -> Any:
    """Calls a model with a copy of a batch, which some write to."""
    if isinstance(batch, tuple) and isinstance(batch[0], Tensor):
        return model(*batch)
    if isinstance(batch, tuple):
        return model(tuple(dict(each) if isinstance(each, dict) else each for each in batch))
    return model(dict(batch) if isinstance(batch, dict) else batch)
