"""Activations from stage to stage, and the TP group of a stage.

The epoch is the communicator: groups are formed anew for each epoch, and order
is first-in first-out per edge, so what crosses carries no header. Shapes come
from the step's control message, so a receive is posted before the sender has
computed anything. Every operation is asynchronous and waited for with a
deadline: a blocking call would wait for the group's whole time-out when a
survivor has left the group (measured with gloo, see docs/decisions/002).
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from services.errors import StageFailed
from services.rpc.addresses import interface_of, join_host_port
from services.topology.facts import MeshShape
from stage_worker.group_sockets import shut_down_connections, tcp_connections
from stage_worker.pending_receive import (
    NOTHING,
    Arrived,
    PeerLost,
    PendingReceive,
    at_once,
    first_line,
)
from stagemesh.v1 import topology_pb2

GLOO = "gloo"
STORE_BACKLOG = 1024
TOKEN_DTYPE = torch.int64


class DataPlane:
    """One rank's collective groups in one epoch at a time.

    `post_receive` may be called from another thread than `send`: they use
    different edges.
    """

    def __init__(
        self,
        backend: str,
        host: str,
        device: torch.device,
        step_timeout_seconds: float,
        arrived: Arrived = at_once,
    ) -> None:
        """`arrived` is the platform's, where a wait for a receive only binds the device."""
        self._arrived = arrived
        self._backend = backend
        self._host = host
        self._device = device
        self._timeout = timedelta(seconds=step_timeout_seconds)
        self._opened: tuple[str, dist.TCPStore] | None = None
        """The store that this rank has opened for the next epoch, by its address."""
        self._store: dist.TCPStore | None = None
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._previous: int | None = None
        self._next: int | None = None
        self._world: dist.ProcessGroup | None = None
        """All ranks, in whose numbers `_previous` and `_next` are. Steps ask it directly: what
        `isend` and `irecv` look up around it takes as long as handing a step's tensor over."""
        self._token_group: dist.ProcessGroup | None = None
        self._sampler: int | None = None
        """The rank that samples, where this one needs its tokens and is another."""
        self._sampler_in_group = 0
        """The same by its number in `_token_group`."""
        self._token_takers: tuple[int, ...] = ()
        """The ranks that need the tokens of this one."""
        self.tensor_parallel_group: dist.ProcessGroup | None = None
        self._not_ours = tcp_connections()

    def open_store(self) -> str:
        """Binds this epoch's rendezvous store and returns its "host:port".

        The socket is ours and handed to the store: on its own the store would
        listen on all interfaces, and a port must be bound before it is announced.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((self._host, 0))
        listener.listen(STORE_BACKLOG)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            self._host,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        address = join_host_port(self._host, port)
        self._opened = (address, store)
        return address

    def form(
        self,
        epoch: int,
        store_address: str,
        shape: MeshShape,
        pp_rank: int,
        tp_rank: int,
        timeout_seconds: float,
    ) -> None:
        """Forms the epoch's groups; blocks until all ranks have met. Raises `PeerLost`."""
        self.leave()
        timeout = timedelta(seconds=timeout_seconds)
        interface = interface_of(self._host)
        if interface is not None:
            # Without it gloo listens on whatever the host name resolves to.
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        rank = shape.global_rank(pp_rank, tp_rank)
        try:
            store = self._store = self._meet_at(store_address, timeout)
            dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"epoch-{epoch}", store),
                rank=rank,
                world_size=shape.world_size,
                timeout=timeout,
            )
            self.tensor_parallel_group = self._form_tensor_parallel(shape, pp_rank, timeout)
            self._form_token_return(shape, rank, timeout)
            self._try_edges(shape, rank, timeout)
        except (RuntimeError, ValueError) as error:
            if not dist.is_initialized():
                _forget_failed_group()
            raise PeerLost(
                f"forming the groups of epoch {epoch} over the store at {store_address} failed: "
                f"{first_line(error)}"
            ) from error
        last = shape.pp_size - 1
        self._world = dist.group.WORLD
        self._previous = rank - shape.tp_size if pp_rank > 0 else None
        self._next = rank + shape.tp_size if pp_rank < last else None

    def _meet_at(self, address: str, timeout: timedelta) -> dist.TCPStore:
        """The rank that opened the store uses it; the others dial it."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == address:
            return opened[1]
        host, _, port = address.rpartition(":")
        return dist.TCPStore(
            host.strip("[]"), int(port), is_master=False, timeout=timeout, wait_for_workers=False
        )

    def _form_tensor_parallel(
        self, shape: MeshShape, pp_rank: int, timeout: timedelta
    ) -> dist.ProcessGroup | None:
        if shape.tp_size == 1:
            return None
        mine = None
        for stage in range(shape.pp_size):  # every rank takes part in making every group
            first = shape.global_rank(stage, 0)
            group = dist.new_group(list(range(first, first + shape.tp_size)), timeout=timeout)
            if stage == pp_rank:
                mine = group
        return mine

    def _form_token_return(self, shape: MeshShape, rank: int, timeout: timedelta) -> None:
        """The edge from the rank that samples to the ranks of stage 0.

        A group of its own: NCCL and HCCL run what two ranks exchange in one group in one
        order, and a receive that is posted ahead would stand before the send it depends on.
        """
        sampler = shape.global_rank(shape.pp_size - 1, 0)
        takers = tuple(
            taker for taker in range(shape.global_rank(0, 0), shape.tp_size) if taker != sampler
        )
        self._token_group = self._sampler = None
        self._token_takers = ()
        if not takers:
            return
        group = dist.new_group([*takers, sampler], timeout=timeout)
        if rank == sampler:
            self._token_group, self._token_takers = group, takers
        elif rank in takers:
            self._token_group, self._sampler = group, sampler
            self._sampler_in_group = dist.get_group_rank(group, sampler)

    def _try_edges(self, shape: MeshShape, rank: int, timeout: timedelta) -> None:
        """Sends one number over every edge, here and now, from the first stage to the last.

        NCCL and HCCL make a communicator for a pair with its first exchange, and block both sides
        for it: the thread that posts receives ahead would wait there for a send that waits for
        its own step. It also shows an edge that does not work before a request does.
        """
        number = torch.zeros(1, dtype=TOKEN_DTYPE, device=self._device)
        stage = rank // shape.tp_size
        works: list[dist.Work | None] = []
        if stage > 0:
            _wait(dist.irecv(number, src=rank - shape.tp_size), timeout)
        if stage < shape.pp_size - 1:
            works.append(dist.isend(number, dst=rank + shape.tp_size))
        works += [dist.isend(number, dst=t, group=self._token_group) for t in self._token_takers]
        if self._sampler is not None:
            received = torch.empty_like(number)
            _wait(dist.irecv(received, src=self._sampler, group=self._token_group), timeout)
        for work in works:
            _wait(work, timeout)
        if not self._arrived(timeout.total_seconds()):
            raise RuntimeError(f"an edge has carried nothing in {timeout.total_seconds():.0f} s")

    def post_token_receive(self, num_tokens: int) -> PendingReceive:
        """Posts the receive of the tokens [num_tokens] int64 that a step samples; nothing on
        ranks that do not need them or sample them. Raises `PeerLost`."""
        if self._sampler is None or num_tokens == 0:
            return NOTHING
        tokens = self._room([((num_tokens,), TOKEN_DTYPE)], f"{num_tokens} sampled tokens")
        return self._post(
            tokens, self._sampler_in_group, self._token_group, "sampled tokens from the last stage"
        )

    def return_tokens(self, tokens: torch.Tensor, max_pending: int) -> None:
        """Sends sampled tokens [m] int64 to stage 0; see `send`."""
        try:
            for taker in self._token_takers:
                work = dist.isend(tokens, dst=taker, group=self._token_group)
                if work is not None:
                    self._sends.append((work, tokens))
            self._wait_for_sends(max_pending)
        except RuntimeError as error:
            raise PeerLost(f"returning tokens to stage 0 failed: {first_line(error)}") from error

    def post_receive(self, schema: topology_pb2.BoundarySchema, num_tokens: int) -> PendingReceive:
        """Posts the receives of one step: per tensor [num_tokens, *trailing_shape].

        Raises `PeerLost`, and `StageFailed` where there is no memory for them.
        """
        if self._previous is None or num_tokens == 0:
            return NOTHING
        shapes = [
            ((num_tokens, *tensor.trailing_shape), getattr(torch, tensor.dtype))
            for tensor in schema.tensors
        ]
        tensors = self._room(shapes, f"{num_tokens} tokens")
        return self._post(tensors, self._previous, self._world, "activations from the stage before")

    def _room(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], what: str
    ) -> tuple[torch.Tensor, ...]:
        try:
            return tuple(
                torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes
            )
        except RuntimeError as error:  # which running out of memory is
            raise StageFailed(f"no memory to receive {what}: {first_line(error)}") from error

    def _post(
        self,
        tensors: tuple[torch.Tensor, ...],
        source: int,
        group: dist.ProcessGroup | None,
        what: str,
    ) -> PendingReceive:
        """`source` is a rank of the group."""
        if group is None:
            raise PeerLost(f"this rank is not in the group that brings {what}")
        try:
            works = tuple(group.recv([tensor], source, 0) for tensor in tensors)
        except RuntimeError as error:
            raise PeerLost(f"posting the receive of {what} failed: {first_line(error)}") from error
        return PendingReceive(tensors, works, self._timeout, what, self._arrived)

    def send(self, tensors: Sequence[torch.Tensor], max_pending: int) -> None:
        """Sends one step's tensors on, and waits for sends older than `max_pending` tensors.

        The tensors are held until their send is done: gloo's is a rendezvous with
        the posted receive and reads the memory until then.
        """
        if self._next is None or self._world is None:
            return
        try:
            for tensor in (given.contiguous() for given in tensors):
                self._sends.append((self._world.send([tensor], self._next, 0), tensor))
            self._wait_for_sends(max_pending)
        except RuntimeError as error:
            raise PeerLost(f"sending to the next stage failed: {first_line(error)}") from error

    def _wait_for_sends(self, max_pending: int) -> None:
        while len(self._sends) > max_pending:
            work, _ = self._sends[0]
            work.wait(self._timeout)
            self._sends.popleft()

    def break_waits(self) -> None:
        """Lets whoever waits in the present epoch's groups fail with `PeerLost`; from any thread.
        Only `leave` may follow."""
        if self._backend == GLOO:
            shut_down_connections(but=self._not_ours)

    def leave(self) -> None:
        """Leaves the present epoch's groups, if there are any."""
        self._sends.clear()
        self.tensor_parallel_group = self._token_group = self._world = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _forget_failed_group() -> None:
    """Lets this process name its next groups as one does that has just been started.

    Torch numbers groups, also one that could not be formed, and ranks with other numbers look for
    each other under other names for ever. Only the end of a default group starts the numbers
    anew, so one of this process alone is made and ended.
    """
    dist.init_process_group(GLOO, store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _wait(work: dist.Work | None, timeout: timedelta) -> None:
    if work is not None:
        work.wait(timeout)
