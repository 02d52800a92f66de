"""The version of serrate; part of every cache key on disk."""

VERSION = "0.1.0"
