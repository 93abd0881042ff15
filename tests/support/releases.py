"""Processes of later releases, made of the present sources by changes as they are imported.

    python -m tests.support.releases next ps-server --update-log=...

next         one format further: renames a field of the log's state, adds one there and one to a message, has
             a further term of jobs and another version; it writes what the present release reads
renamed      one format further, but writes the new name alone: nobody can go back from its logs
after-next   two formats further
"""

import importlib
import importlib.machinery
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

COMMANDS = {"ps-server": "ctr_ps.ps_server.cli", "ps-worker": "ctr_ps.ps_worker.cli"}

ROOT = Path(__file__).parents[2]
(_FORMAT,) = re.findall(r"^FORMAT = (\d+)$", (ROOT / "protos/format.py").read_text(), re.MULTILINE)

Changes = Mapping[str, Sequence[tuple[str, str]]]
"""By file: lines that are there once, and what they become."""


def _further(formats: int) -> Changes:
    return {
        "protos/format.py": [(f"\nFORMAT = {_FORMAT}\n", f"\nFORMAT = {int(_FORMAT) + formats}\n")],
        "protos/runtime/environment.py": [
            ('        return version("ctr-ps")\n', f'        return "9.{formats}.0"\n')
        ],
    }


_OLD, _NEW = "next_step", "first_open_step"

_RENAMED: Changes = {
    "ps_server/coordination/job_state.py": [
        ("import dataclass, field\n", "import dataclass, field\nfrom typing import Annotated\n"),
        (
            "from ctr_ps.protos.chunking",
            "from pydantic import AliasChoices, Field\n\nfrom ctr_ps.protos.chunking",
        ),
        (
            f"    {_OLD}: Mapping[int, Version]\n",
            f"    {_NEW}: Annotated[\n"
            "        Mapping[int, Version],\n"
            f'        Field(validation_alias=AliasChoices("{_NEW}", "{_OLD}"),'
            f' serialization_alias="{_OLD}"),\n'
            "    ]\n"
            '    added: str = "for the test"\n',
        ),
    ],
    "ps_server/coordination/coordinator.py": [
        (f"                {_OLD}=self", f"                {_NEW}=self")
    ],
    "ps_server/coordination/steps.py": [(f"dict(state.{_OLD})", f"dict(state.{_NEW})")],
    "ps_server/rpc/journal.py": [
        ("STATE_JSON.dump_json(job)", "STATE_JSON.dump_json(job, by_alias=True)")
    ],
}

_ADDED: Changes = {
    "protos/wire/requests.py": [
        (
            "    push_id: PushId\n    at: Version | None = None\n    shard_map_epoch: int\n",
            "    push_id: PushId\n    at: Version | None = None\n    shard_map_epoch: int\n"
            "    release: int = 2\n",
        )
    ],
    "ps_server/rpc/handlers.py": [
        (
            "        _require_exact_steps(request.chunk, request.at)\n        return",
            "        _require_exact_steps(request.chunk, request.at)\n"
            '        self._log_once(f"a push of release {request.release}")\n        return',
        )
    ],
    "ps_worker/run/plan.py": [
        (
            "        **members.terms,\n",
            '        **members.terms,\n        "of the next release": "1",\n',
        )
    ],
}

_ALONE: Changes = {
    "ps_server/coordination/job_state.py": [
        *_RENAMED["ps_server/coordination/job_state.py"],
        (f' serialization_alias="{_OLD}"', ""),
    ]
}

RELEASES: Mapping[str, Changes] = {
    "next": {**_further(1), **_RENAMED, **_ADDED},
    "renamed": {**_further(1), **_RENAMED, **_ALONE},
    "after-next": _further(2),
}


def changed(release: str, file: str, source: str) -> str:
    """Returns the source of a file in a release."""
    for old, new in RELEASES[release].get(file, ()):
        assert source.count(old) == 1, f"the lines are not in {file} once: {old}"
        source = source.replace(old, new)
    if file == "protos/v1/data_plane_pb2.py" and _ADDED.items() <= RELEASES[release].items():
        (literal,) = re.findall(r"AddSerializedFile\((b'.*')\)", source)
        source = source.replace(literal, repr(_with_release(eval(literal))))
    return source


def _with_release(serialized: bytes) -> bytes:
    """Adds the field `release` to PushGradRequest."""
    file = FileDescriptorProto.FromString(serialized)
    (message,) = (each for each in file.message_type if each.name == "PushGradRequest")
    _add_field(message, "release", 9)
    return file.SerializeToString()


def _add_field(message: DescriptorProto, name: str, number: int) -> None:
    assert number not in {field.number for field in message.field}
    message.field.add(
        name=name,
        number=number,
        type=FieldDescriptorProto.TYPE_UINT32,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )


def install(release: str) -> None:
    """Has this process import the package as a release has it; to be called before."""
    get_code = importlib.machinery.SourceFileLoader.get_code
    files = {*RELEASES[release], "protos/v1/data_plane_pb2.py"}

    def changed_code(self: Any, fullname: str) -> Any:
        file = fullname.removeprefix("ctr_ps.").replace(".", "/") + ".py"
        if not fullname.startswith("ctr_ps.") or file not in files:
            return get_code(self, fullname)
        source = changed(release, file, Path(self.path).read_text())
        return compile(source, self.path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = changed_code  # type: ignore[method-assign]


def main() -> None:
    """Runs a command of a release with the arguments that follow."""
    release, command, *arguments = sys.argv[1:]
    install(release)
    sys.argv = [command, *arguments]
    importlib.import_module(COMMANDS[command]).main()


if __name__ == "__main__":
    main()
