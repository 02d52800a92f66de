"""The version of serrate; part of the key of everything that is kept from one process to the next."""

VERSION = "0.1.0"
