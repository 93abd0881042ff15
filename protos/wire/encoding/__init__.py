"""Values as the bytes of messages, and back: arrays as columns, dataclasses as fields."""
