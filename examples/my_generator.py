r"""A parser of one's own: Criteo's rows, a label, 13 numbers and 26 values with tabs between them.

To see what the trainer would read, and to train on it, in processes of its own or in the trainer's:

    cat part-0 | python examples/my_generator.py
    QueueDataset(schema, 512, format=piped("python examples/my_generator.py", values="text"))
    QueueDataset(schema, 512, format=generated(CriteoGenerator()))
"""

from collections.abc import Callable, Iterator

# `from ps_worker.fleet import MultiSlotStringDataGenerator` is the same class, but takes longer to load.
from ps_worker.data.user_code.data_generator import MultiSlotStringDataGenerator

Sample = list[tuple[str, list[str]]]


class CriteoGenerator(MultiSlotStringDataGenerator):
    """Text goes on as it is: the trainer hashes values and scales numbers as its schema says."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Sample]]:
        """Returns a function that yields the one sample of a line."""

        def samples() -> Iterator[Sample]:
            label, *columns = (line or "").rstrip("\n").split("\t")
            numbers = [number or "nan" for number in columns[:13]]
            values = [(f"C{i}", [value]) for i, value in enumerate(columns[13:], start=1)]
            yield [("dense_input", numbers), *values, ("click", [label])]

        return samples


if __name__ == "__main__":
    CriteoGenerator().run_from_stdin()
