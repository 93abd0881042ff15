r"""A user-defined parser of Criteo's rows: a label, 13 numbers and 26 values, tab-separated.

The first line prints what the trainer would read; the others read it as a pipe command and in process.

    cat part-0 | python examples/my_generator.py
    QueueDataset(schema, 512, format=piped("python examples/my_generator.py", values="text"))
    QueueDataset(schema, 512, format=generated(CriteoGenerator()))
"""

from collections.abc import Callable, Iterator

from ctr_ps import MultiSlotStringDataGenerator

Sample = list[tuple[str, list[str]]]


class CriteoGenerator(MultiSlotStringDataGenerator):
    """Passes text through unchanged: the trainer hashes values and scales numbers by its schema."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Sample]]:
        """Returns a function that yields the sample of a line."""

        def samples() -> Iterator[Sample]:
            label, *columns = (line or "").rstrip("\n").split("\t")
            numbers = [number or "nan" for number in columns[:13]]
            values = [(f"C{i}", [value]) for i, value in enumerate(columns[13:], start=1)]
            yield [("dense_input", numbers), *values, ("click", [label])]

        return samples


if __name__ == "__main__":
    CriteoGenerator().run_from_stdin()
