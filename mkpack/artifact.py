"""NAME.mkpack, one zip that is mapped in place, or its unpacked folder: write, open, map, verify. See docs/ARTIFACT.md.

Nothing here loads native code, and whatever is opened counts as hostile until its digests are checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mkpack.container import BLOCKS_AHEAD, MAX_ENTRIES, ZipWriter, names_problems
from mkpack.digest import Digester, Progress, Verification
from mkpack.errors import InternalError, UserError, combine, nearest, os_errors, size
from mkpack.manifest import CHUNK, MANIFEST_NAME, Entry, Manifest, capped, shown
from mkpack.platform import can_punch_holes, punch_hole
from mkpack.store import FolderStore, Use, ZipStore, address

if TYPE_CHECKING:
    from mkpack.snapshot import SnapshotStore

MAX_MANIFEST = 64 << 20  # bytes
BLOCK = 4 << 20  # bytes in memory while an entry is copied


@dataclass(frozen=True)
class Given:
    """A file that is given up: it is emptied while it is copied, where the file system can, so that the disk holds its
    bytes once."""

    path: Path


class Artifact:
    """An opened artifact: its names and sizes agree with its manifest; its bytes are unchecked until verified."""

    def __init__(
        self, path: Path, manifest: Manifest, manifest_bytes: bytes, store: ZipStore | FolderStore | SnapshotStore
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._manifest_bytes = manifest_bytes
        self._store = store
        self._pinned: dict[str, memoryview] = {}
        self._verifications: list[Verification] = []

    @property
    def held(self) -> list[str]:
        """The entries that this copy has: all of them, or of a repo those that were pulled."""
        return [name for name in self.manifest.entries if name in self._store.names]

    @property
    def digest(self) -> str:
        """sha256 of manifest.json. The manifest digests everything else, so this names the whole artifact."""
        return hashlib.sha256(self._manifest_bytes).hexdigest()

    def read(self, name: str, verify: bool = True) -> bytes:
        """Bytes of an entry. UserError when there is none of that name, or its digest differs (unless verify=False)."""
        if name == MANIFEST_NAME:
            return self._manifest_bytes
        entry = self._entry(name)
        data = bytes(self._view(name))
        if verify and (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
            raise UserError(
                f"{self.path} is damaged (copy or download it again, or rebuild it): {name}: sha256 "
                f"expected {entry.sha256}, found {found}"
            )
        return data

    def map(self, name: str, use: Use = "stay") -> memoryview:
        """Bytes of an entry in place, unchecked, read-only; weights start at a multiple of 4096. use: "stay" asks for
        read-ahead of the whole, "pass" says that it is read once, from one end to the other.

        The view may outlive close(). Whoever truncates the file meanwhile ends this process with SIGBUS; write_artifact
        replaces files and never does.
        """
        view = self._view(name)
        self._store.advise(name, use)
        return view

    def address(self, name: str, use: Use = "stay") -> int:
        """Address of map(name, use) for native code, which may only read there. Valid until close()."""
        view = self._pinned[name] = self.map(name, use)
        return address(view)

    def drop(self, name: str) -> None:
        """Gives back the memory that reading an entry took; addresses and views stay valid."""
        self._store.advise(name, "drop")

    def verify(
        self,
        names: Iterable[str] | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        full: bool = False,
    ) -> list[str]:
        """Problems of the named entries (all by default), one text per damaged entry; empty when every byte is right.

        `full` also compares the whole digest of entries that have chunk digests. `progress(done, total)` gets bytes.
        """
        verification = self.verify_async(names, threads, progress, full)
        try:
            return verification.problems()
        finally:
            self._verifications.remove(verification)

    def verify_async(
        self,
        names: Iterable[str] | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        full: bool = False,
    ) -> Verification:
        """verify() in the background: `.result()` raises UserError listing every damaged entry, `.problems()` lists."""
        chosen = list(self.manifest.entries if names is None else names)
        items = {n: (self._entry(n), self._store.view(n) if n in self._store.sizes else None) for n in chosen}
        verification = Verification(str(self.path), items, threads, progress, full)
        self._verifications.append(verification)
        return verification

    def close(self) -> None:
        """Ends checks that still run and lets go of the file. Addresses are invalid from here on."""
        for verification in self._verifications:
            verification.cancel()
        self._verifications.clear()
        self._pinned.clear()
        self._store.close()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _view(self, name: str) -> memoryview:
        if (size := self._entry(name).size) != self._store.sizes.get(name):
            raise UserError(f"{self.path} is damaged: no entry {name} of {size} bytes")
        return self._store.view(name)

    def _entry(self, name: str) -> Entry:
        entries = self.manifest.entries
        if name not in entries:
            raise UserError(f"{self.path}: no entry {shown(name)}{nearest(name, entries)}")
        return entries[name]


def open_artifact(path: Path | str, problems: list[str] | None = None) -> Artifact:
    """Opens an artifact file or its unpacked folder and checks names and sizes. Reads no entry but the manifest.

    UserError listing every problem. With `problems`, what is wrong with the entries is appended to that list instead,
    so that the caller can report it with problems of its own (verify() repeats those of missing or cut entries in the
    same words); only a container or manifest that cannot be read raises.
    """
    path = Path(path)
    with os_errors(f"open {path}"):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError) as e:
            raise UserError(f"{path}: no such file or folder{_may_be_a_repo(path)}") from e
        except ValueError as e:  # a null byte
            raise UserError(f"{ascii(str(path))}: not a path") from e
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UserError(f"{path}: neither a file nor a folder")
        try:
            store = FolderStore(path) if stat.S_ISDIR(mode) else ZipStore(path)
        except UserError as e:
            raise UserError(f"{path} is not an artifact: {e}") from e
        try:
            return _checked(path, store, problems)
        except BaseException:
            store.close()
            raise


def _may_be_a_repo(path: Path) -> str:
    """What to do for who gave a repo's name to a command that takes files only."""
    if path.is_absolute() or len(path.parts) != 2 or path.suffix == ".mkpack" or path.parent.is_dir():
        return ""
    return f"; if it is a repo on the hub: mkpack pull {path} downloads and checks it; name the folder that it tells"


def _checked(path: Path, store: ZipStore | FolderStore, problems: list[str] | None) -> Artifact:
    found = store.problems
    try:
        data = _manifest_bytes(store)
        manifest = Manifest.parse(data, MANIFEST_NAME)
    except UserError as e:
        raise combine(f"{path} is not an artifact", capped([*found, str(e)])) from e
    for name, entry in manifest.entries.items():
        if name not in store.names:
            found.append(f"{name}: missing")
        elif store.sizes.get(name, entry.size) != entry.size:
            found.append(f"{name}: expected {entry.size} bytes, found {store.sizes[name]}")
    known = {MANIFEST_NAME, *manifest.entries}
    found += [f"{shown(name)}: not in the manifest" for name in sorted(store.names - known)]
    if found and problems is None:
        raise combine(f"{path} is damaged (copy or download it again, or rebuild it)", capped(found))
    if problems is not None:
        problems += found
    return Artifact(path, manifest, data, store)


def _manifest_bytes(store: ZipStore | FolderStore) -> bytes:
    size = store.sizes.get(MANIFEST_NAME)
    if size is None:
        raise UserError(f"no {MANIFEST_NAME}")
    if size > MAX_MANIFEST:
        raise UserError(f"{MANIFEST_NAME} has {size} bytes, at most {MAX_MANIFEST} are allowed")
    data = bytes(store.view(MANIFEST_NAME))
    store.check_manifest(data)
    return data


def write_artifact(
    path: Path,
    entries: Sequence[tuple[str, Path | bytes | Given]],
    make_manifest: Callable[[dict[str, Entry]], Manifest],
    progress: Progress | None = None,
) -> Manifest:
    """Writes an artifact file: equal names, bytes and manifest give equal files, in whatever order they are given.

    `entries` are names with a file or bytes, without manifest.json; `make_manifest` gets their digests, computed while
    they are copied, and must list exactly those. `progress(done, total)` gets bytes of entries. `path` appears when it
    is complete and safe on disk, or not at all. UserError: unusable names, a full disk, a file that cannot be read.
    """
    # Weights last, so that everything else lies together; the manifest after all, since it holds their digests.
    ordered = sorted(entries, key=lambda entry: (entry[0].startswith("weights/"), entry[0]))
    names = [name for name, _ in ordered]
    if bad := list(names_problems([*names, MANIFEST_NAME])):
        raise combine(f"cannot write {path}", capped(bad))
    if len(names) >= MAX_ENTRIES:
        raise UserError(f"cannot write {path}: {len(names)} entries, at most {MAX_ENTRIES - 1} fit")
    if path.is_dir():
        raise UserError(f"cannot write {path}: a folder of that name is in the way")
    with os_errors(f"write {path}"):
        sizes = [_size(source) for _, source in ordered]
        punched = can_punch_holes(path.parent)
        new = [size for (_, s), size in zip(ordered, sizes, strict=True) if not (punched and isinstance(s, Given))]
        # Headers and padding take less than 8 KiB an entry.
        _check_space(path, sum(new) + BLOCK + 8192 * (len(sizes) + 1))
        temporary = _temporary(path)
        try:
            with open(temporary, "wb") as out:
                manifest = _write_zip(ZipWriter(out), ordered, sizes, make_manifest, progress)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    return manifest


def _write_zip(
    writer: ZipWriter,
    entries: list[tuple[str, Path | bytes | Given]],
    sizes: list[int],
    make_manifest: Callable[[dict[str, Entry]], Manifest],
    progress: Progress | None,
) -> Manifest:
    digests: dict[str, Entry] = {}
    done, total = 0, sum(sizes)
    for (name, source), nbytes in zip(entries, sizes, strict=True):
        digester = Digester(nbytes)
        blocks = _ahead(_blocks(source)) if nbytes > CHUNK else _blocks(source)
        writer.add(name, nbytes, digester.through(_told(blocks, done, total, progress)))
        digests[name] = digester.entry()
        done += nbytes
    manifest = make_manifest(dict(digests))
    if manifest.entries != digests:
        raise InternalError("the manifest does not list exactly the entries that were written")
    data = manifest.to_bytes()
    if len(data) > MAX_MANIFEST:
        raise UserError(f"the manifest has {len(data)} bytes, at most {MAX_MANIFEST} are allowed")
    writer.add(MANIFEST_NAME, len(data), [data])
    writer.finish()
    return manifest


def _ahead(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks, read in a thread of their own while those before them are used."""
    with ThreadPoolExecutor(1) as pool:
        under_way = deque(pool.submit(next, blocks, None) for _ in range(BLOCKS_AHEAD))
        while (block := under_way.popleft().result()) is not None:
            under_way.append(pool.submit(next, blocks, None))
            yield block


def _told(blocks: Iterable[bytes], done: int, total: int, progress: Progress | None) -> Iterator[bytes]:
    """The blocks, with progress after each: the weights of a rank may be hundreds of GB."""
    for block in blocks:
        yield block
        done += len(block)
        if progress:
            progress(done, total)


def _size(source: Path | bytes | Given) -> int:
    if isinstance(source, bytes):
        return len(source)
    return (source.path if isinstance(source, Given) else source).stat().st_size


def _blocks(source: Path | bytes | Given) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    path, mode = (source.path, "r+b") if isinstance(source, Given) else (source, "rb")
    with open(path, mode, buffering=0) as file:
        done = 0
        while block := file.read(BLOCK):
            yield block
            if isinstance(source, Given):  # its copy is written, or will be: until then it is in memory
                punch_hole(file.fileno(), done, len(block))
            done += len(block)


def extract(path: Path | str, folder: Path) -> None:
    """Unpacks an artifact into `folder`, which must not exist or be empty; open_artifact takes it alike.

    Every digest is checked first. The folder appears complete or not at all. UserError otherwise.
    """
    with open_artifact(path) as artifact, os_errors(f"unpack to {folder}"):
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"cannot unpack to {folder}: it exists; name a new folder")
        artifact.verify_async().result()
        names = [*artifact.manifest.entries, MANIFEST_NAME]
        _check_space(folder, sum(e.size for e in artifact.manifest.entries.values()) + 8192 * len(names))
        temporary = _temporary(folder)
        _remove(temporary)
        try:
            for name in names:
                data = memoryview(artifact.read(name)) if name == MANIFEST_NAME else artifact.map(name, "pass")
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "xb") as out:
                    for start in range(0, len(data), BLOCK):
                        out.write(data[start : start + BLOCK])
                    out.flush()
                    os.fsync(out.fileno())
            os.rename(temporary, folder)
        except BaseException:
            _remove(temporary)
            raise
        _sync_folder(folder.parent)


# A process that is killed leaves only a file of this name (or a build's .work folder), which says whose it was.
def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def abandoned(path: Path) -> list[Path]:
    """What killed processes left beside `path`. Call it under build_lock(path)."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9]{{1,9}})\.(tmp|work)")
    with os_errors(f"clean {path.parent}"):
        found = [(item, pattern.fullmatch(item.name)) for item in sorted(path.parent.iterdir())]
    return [item for item, match in found if match and not _alive(int(match[1]))]


def clean_temporaries(path: Path, keep: Collection[Path] = ()) -> list[Path]:
    """Removes what killed processes left beside `path`, but `keep`, and returns it. Call it under build_lock(path)."""
    removed = []
    for item in abandoned(path):
        # A compiler that outlives its killed build may still write there; then the next build removes it.
        with contextlib.suppress(OSError):
            if item not in keep:
                _remove(item)
                removed.append(item)
    return removed


@contextlib.contextmanager
def build_lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock `.NAME.mkpack.lock` beside an artifact; `waiting` is called once when another holds it.

    The kernel drops it when the holder dies. The file itself stays: removing it would let two in.
    """
    import filelock

    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    with os_errors(f"lock {path}"):
        try:
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                if waiting:
                    waiting()
                lock.acquire()
        except NotImplementedError as e:
            raise UserError(f"cannot lock {path}: its file system has no locks; write to another one") from e
    try:
        yield
    finally:
        lock.release()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _remove(item: Path) -> None:
    if item.is_dir() and not item.is_symlink():
        shutil.rmtree(item)
    else:
        item.unlink(missing_ok=True)


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise UserError(
            f"{path}: needs {size(needed)} of disk, {size(free)} are free in "
            f"{path.parent}; free some or choose another folder"
        )


def _sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
