"""Routed shards: people by keyed hash in shards, and a router to the shard that knows them.

What trains a shard and carries out a request on it is not here yet.
"""
