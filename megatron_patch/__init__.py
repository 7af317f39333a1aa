"""Placeholder for the Megatron adapter, which is not part of this release.

The UPipe attention core in ``upipe_integrations`` does not depend on a training framework, and the
adapter that will hook it into Megatron-Core belongs here. This package holds its name and nothing
else: it patches nothing, imports nothing and exports nothing, so importing it has no effect.
"""

__all__: list[str] = []
