from protos.v1 import control_plane_pb2 as _control_plane_pb2
from protos.v1 import data_plane_pb2 as _data_plane_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
