"""An attention module of Transformers, read by the names that its family has for its layers, norms and sinks.

A module's attributes are asked for by name here; what is done with them is the matter of ``facts`` and ``layer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed_plugin.transformers.adapters import is_unmodified, parameters_read
from deepspeed_plugin.transformers.families import Family
from deepspeed_plugin.transformers.latent import latent_inputs
from upipe_integrations import Mode


@dataclass(frozen=True)
class AttentionReader:
    """An attention module and the line of the table that its class has."""

    module: nn.Module
    family: Family

    def value(self, name: str | None) -> Any:
        """The module's attribute of that name, which the class has by its family; None where the family names none."""
        return None if name is None else getattr(self.module, name)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the linear layers whose outputs are q, k and v: three layers, one, or latent attention's two."""
        if self.family.latent is not None:
            return latent_inputs(self.module)
        return ("q_proj", "k_proj", "v_proj") if self.family.qkv_layer is None else (self.family.qkv_layer,)

    def input_layers(self) -> dict[str, nn.Module]:
        """Those layers, by name."""
        return {name: self.value(name) for name in self.input_names}

    @property
    def output_layer(self) -> nn.Module:
        """The output projection."""
        layer: nn.Module = self.value(self.family.output)
        return layer

    @property
    def norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The norms of queries and of keys; None in layers without."""
        q, k = self.family.norms
        return getattr(self.module, q, None), getattr(self.module, k, None)

    @property
    def sinks(self) -> nn.Parameter | None:
        """The parameter with a sink per head, `[H]`; None in layers without."""
        sinks: nn.Parameter | None = self.value(self.family.sinks)
        return sinks

    def reads_output(self, mode: Mode) -> bool:
        """Whether the weight of the output projection is read too, so that the engine runs it.

        `mode` has it in the stage loop; or can run it after, and reading it is all that calling it would do.
        """
        if mode.output_in_loop:
            return True
        return mode.keeps_output and self.family.gate is None and is_unmodified(self.output_layer)

    def layers_read(self, mode: Mode) -> dict[str, nn.Module]:
        """The linear layers whose weights are read directly, by name."""
        layers = self.input_layers()
        if self.reads_output(mode):
            layers[self.family.output] = self.output_layer
        return layers

    def parameters_read(self, mode: Mode) -> Iterator[nn.Parameter]:
        """The parameters that are read directly: of linear layers and their adapters, of norms, and sinks."""
        for layer in self.layers_read(mode).values():
            yield from parameters_read(layer)
        for norm in self.norms:
            if norm is not None:
                yield from norm.parameters(recurse=False)
        if self.sinks is not None:
            yield self.sinks
