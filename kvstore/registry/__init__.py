"""Membership: who is in the cluster, in which state, at which epoch."""

from kvstore.registry.config import RegistryConfig
from kvstore.registry.redis_link import RegistryAway
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.registry.standing import Membership
from kvstore.registry.view_source import StaticViews, ViewSource

__all__ = ["EmbeddedRedis", "Membership", "RedisRegistry", "RegistryAway", "RegistryConfig", "StaticViews", "ViewSource"]
