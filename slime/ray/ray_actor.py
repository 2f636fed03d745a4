"""The base class of actors that open a port: the address of their node and its free ports."""

from __future__ import annotations

from slime.utils.misc import get_current_node_ip, get_free_port


class RayActor:
    """Base of actors that others connect to."""

    master_addr: str
    master_port: int

    @staticmethod
    def _get_current_node_ip_and_free_port(
        start_port: int = 10000, consecutive: int = 1
    ) -> tuple[str, int]:
        """This node's address and the first of `consecutive` free ports from `start_port` on."""
        return get_current_node_ip(), get_free_port(start_port=start_port, consecutive=consecutive)

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Where the other ranks of this actor's process group meet."""
        return self.master_addr, self.master_port
