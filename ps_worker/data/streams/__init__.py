"""Streams: messages of Kafka, Redis or a folder to batches, with positions in partitions."""
