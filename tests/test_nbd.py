"""NBD exports: what comes back, and what the servers were asked for it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import reference
from conftest import HANG, Imgsum, find_tool
from fakenbd import Client, FakeNbd
from reference import GIB, KIB, MIB

from imgsum import OpenOptions, checksum
from imgsum.errors import Error, MissingError, OpenError, UsageError
from imgsum.source.nbd import tls

SPEC = "3m:R 5m:- 70k:R 1m:0 100k:A 2m:-"
EMPTY = "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"

if TYPE_CHECKING:
    from nbdservers import Servers

pytest_plugins = ["nbdservers"]

Image = Callable[..., Path]


def expected(spec: str) -> str:
    return reference.blkhash(reference.chunks(spec))


def zeros(size: int) -> str:
    """The checksum of whole blocks of zeros."""
    block = hashlib.sha256(bytes(64 * KIB)).digest()
    return hashlib.sha256(block * (size // (64 * KIB)) + size.to_bytes(8, "little")).hexdigest()


def export(uri: str, **options: Any) -> str:
    return checksum(uri, options=OpenOptions(**options)).hexdigest


# --- content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="as it is"),
        pytest.param(["--filter=noextents"], id="no extents"),
        pytest.param(["--no-sr"], id="no structured replies"),
        pytest.param(["--mask-handshake=0"], id="no fixed newstyle"),
        pytest.param(["--oldstyle"], id="oldstyle handshake"),
        pytest.param(["--filter=multi-conn", "--filter=noparallel"], id="one at a time"),
    ],
)
@pytest.mark.parametrize("extents", [True, False])
def test_nbdkit(servers: Servers, image: Image, words: list[str], extents: bool) -> None:
    server = servers.nbdkit(*words, "file", image(SPEC))
    assert export(server.uri, extents=extents) == expected(SPEC)


@pytest.mark.parametrize("spec", [SPEC, "64k:R", "512:R", "66048:R", "1m:- 512:A", "512:A 1m:-", "64k:- 1m:R 65024:-"])
def test_qemu_nbd(servers: Servers, image: Image, spec: str) -> None:
    assert export(servers.qemu_nbd(image(spec)).uri) == expected(spec)


@pytest.mark.parametrize("size", [0, 1, 511, 513, 4097, 65535, 65537, 3 * MIB + 1])
def test_sizes_that_are_no_multiple_of_anything(servers: Servers, image: Image, size: int) -> None:
    spec = f"{size}:R" if size else ""
    assert export(servers.nbdkit("file", image(spec)).uri) == expected(spec)


def test_an_empty_export(servers: Servers, imgsum: Imgsum) -> None:
    server = servers.nbdkit("memory", "0")
    result = imgsum("checksum", "--progress", server.uri)
    assert (result.status, result.text) == (0, f"{EMPTY}  {server.uri}\n")


def test_a_range_that_is_on_no_block(servers: Servers, image: Image) -> None:
    server = servers.nbdkit("--filter=blocksize-policy", "file", image("1m:R"), *policy(4096, 65536))
    options = OpenOptions()
    got = checksum(server.uri, offset=1000, length=300_000, options=options)
    assert got.hexdigest == reference.blkhash(reference.content("1m:R")[1000:301_000])


def test_sparse_random(servers: Servers) -> None:
    server = servers.nbdkit("sparse-random", "64M", "seed=1", "percent=20")
    content = subprocess.run([find_tool("nbdcopy"), server.uri, "-"], check=True, capture_output=True).stdout
    assert export(server.uri) == export(server.uri, extents=False) == reference.blkhash(content)


def policy(minimum: int, maximum: int) -> list[str]:
    return [
        f"blocksize-minimum={minimum}",
        f"blocksize-preferred={max(minimum, min(4096, maximum))}",
        f"blocksize-maximum={maximum}",
        "blocksize-error-policy=error",
    ]


@pytest.mark.parametrize("request_size", [4 * KIB, MIB])
@pytest.mark.parametrize(("minimum", "maximum"), [(4096, 65536), (512, 4096), (65536, MIB), (1, 32768)])
def test_the_servers_block_sizes_are_kept(
    servers: Servers, image: Image, minimum: int, maximum: int, request_size: int
) -> None:
    """The server refuses a request that is too large, or not aligned."""
    spec = "192k:R 300k:- 20k:R 1m:R 512k:-"
    spec += f" {-reference.size(spec) % 65536}:A"
    server = servers.nbdkit("--filter=blocksize-policy", "file", image(spec), *policy(minimum, maximum), log=True)
    assert export(server.uri, request_size=request_size) == expected(spec)
    reads = server.requests("Read")
    assert reads
    assert all(offset % minimum == length % minimum == 0 and length <= maximum for offset, length in reads)


@pytest.mark.parametrize(
    ("preferred", "request_size", "largest"),
    [
        pytest.param(4096, MIB, 512 * KIB, id="default"),
        pytest.param(4096, 64 * KIB, 64 * KIB, id="smaller"),
        pytest.param(4096, 4 * MIB, 4 * MIB, id="larger"),
        pytest.param(8 * MIB, MIB, MIB, id="the server likes more"),
    ],
)
def test_request_sizes(short_path: Path, preferred: int, request_size: int, largest: int) -> None:
    content = reference.content("5m:R")
    with FakeNbd(short_path, content, block_sizes=(1, preferred, 32 * MIB)) as server:
        assert export(server.uri, request_size=request_size) == expected("5m:R")
        assert max(length for _, length in server.reads()) == largest


# --- extents --------------------------------------------------------------------------------------------------------


def test_zeros_are_not_read(servers: Servers, image: Image) -> None:
    server = servers.nbdkit("file", image("64k:R 5m:- 64k:R 10m:-"), log=True)
    assert export(server.uri) == expected("64k:R 5m:- 64k:R 10m:-")
    # A file system may take a little more for data.
    assert sum(length for _, length in server.requests("Read")) <= 256 * KIB


def test_an_empty_6_gib_export_of_qemu_nbd_is_not_read(servers: Servers, image: Image) -> None:
    """Counted by nbdkit's log filter, which stands between the two as a proxy."""
    behind = servers.qemu_nbd(image("6g:-"))
    server = servers.nbdkit("nbd", behind.uri, log=True)
    assert export(server.uri) == zeros(6 * GIB)
    assert server.requests("Read") == []
    assert server.requests("Extents") != []
    server = servers.nbdkit("nbd", behind.uri, log=True)
    with pytest.raises(Error):  # or else the log would be empty anyway
        checksum(server.uri, length=7 * GIB)
    assert checksum(server.uri, length=64 * KIB, options=OpenOptions(extents=False)).size == 64 * KIB
    assert server.requests("Read") == [(0, 64 * KIB)]


def test_a_tib_of_zeros_takes_little_memory_and_no_read(servers: Servers, imgsum: Imgsum) -> None:
    server = servers.nbdkit("memory", "1T", log=True)
    result, peak = imgsum.peak_memory("checksum", "-a", "xxh64", "-b", "1m", server.uri)
    assert result.status == 0
    assert peak <= 64 * MIB
    assert server.requests("Read") == []
    asked = server.requests("Extents")
    assert max(length for _, length in asked) <= GIB
    assert len(asked) < 1100


def test_many_small_extents_take_little_memory(servers: Servers, imgsum: Imgsum, tmp_path: Path) -> None:
    """A hole of 3 GiB raises what is asked at once; then 15000 extents come."""
    listed = tmp_path / "extents"
    with open(listed, "w") as out:
        out.write("0 3221225472 hole,zero\n")
        out.writelines(f"{(3 << 30) + i * 8192} 4096 hole,zero\n" for i in range(15_000))
    server = servers.nbdkit("--filter=extentlist", "memory", "4G", f"extentlist={listed}")
    result, peak = imgsum.peak_memory("checksum", "-a", "xxh64", server.uri)
    assert result.status == 0
    assert peak <= 64 * MIB


def test_a_server_that_fails_to_say_is_asked_once(servers: Servers) -> None:
    server = servers.nbdkit(
        "eval",
        "get_size=echo 10485760",
        "can_extents=exit 0",
        "pread=dd if=/dev/zero count=$3 iflag=count_bytes status=none",
        "extents=echo EIO nope >&2; exit 1",
        log=True,
    )
    assert export(server.uri) == expected("10m:0")
    assert len(server.requests("Extents")) == 1
    assert sum(length for _, length in server.requests("Read")) == 10 * MIB


def test_holes_that_are_not_zero_are_read(servers: Servers, image: Image) -> None:
    server = servers.nbdkit(
        "eval",
        "get_size=echo 1048576",
        "can_extents=exit 0",
        f"pread=dd if={image('1m:R')} count=$3 skip=$4 iflag=count_bytes,skip_bytes status=none",
        "extents=echo 0 1048576 hole",
    )
    assert export(server.uri) == expected("1m:R")


# --- connections ----------------------------------------------------------------------------------------------------


def test_each_worker_has_a_connection(servers: Servers) -> None:
    server = servers.nbdkit("--filter=delay", "pattern", "32M", "rdelay=20ms", log=True)
    got = checksum(server.uri)
    assert got.stats.details["nbd_connections"] == 8
    assert server.connections() == 8


@pytest.mark.parametrize("connections", [1, 2, 3])
def test_as_many_connections_as_asked_for(servers: Servers, image: Image, connections: int) -> None:
    server = servers.nbdkit("--filter=delay", "file", image("8m:R"), "rdelay=20ms", log=True)
    assert export(server.uri, connections=connections) == expected("8m:R")
    assert server.connections() == connections


def test_without_multi_conn_the_requests_share_one_connection(short_path: Path) -> None:
    """All are in flight together: this server answers only when all 8 workers have asked, and the last one first."""
    content = reference.content("4m:R")
    waiting: list[tuple[int, int, int]] = []

    def answer(client: Client, *request: int) -> None:
        waiting.append(request)
        if len(waiting) == 8:
            for cookie, offset, length in reversed(waiting):
                client.data(cookie, offset, content[offset : offset + length])

    with FakeNbd(short_path, content, on_read=answer, multi_conn=False) as server:
        assert export(server.uri, io_timeout=HANG, request_size=512 * KIB) == expected("4m:R")
        assert server.connections == 1


def test_a_server_with_fewer_places_than_it_says(servers: Servers, image: Image) -> None:
    """qemu-nbd --shared=2 lets a third client wait for ever."""
    server = servers.qemu_nbd(image("8m:R"), "--shared=2")
    got = checksum(server.uri)
    assert got.hexdigest == expected("8m:R")
    assert got.stats.details["nbd_connections"] == 2


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a b", "a%20b"),
        ("a/b", "a/b"),
        ("a/b", "a%2Fb"),
        ("\u017elu\u0165", "%C5%BElu%C5%A5"),
        ("%41", "%2541"),
        ("", ""),
    ],
)
def test_export_names(servers: Servers, name: str, written: str) -> None:
    server = servers.nbdkit(
        "eval",
        "get_size=echo 4096",
        f"open=[ \"$3\" = '{name}' ] || {{ echo ENOENT no such export >&2; exit 1; }}",
        "pread=dd if=/dev/zero count=$3 iflag=count_bytes status=none",
    )
    assert export(server.uri.replace("///", f"///{written}")) == expected("4k:0")
    with pytest.raises(OpenError, match="no export named 'other'"):
        export(server.uri.replace("///", "///other"))


def test_ipv6(servers: Servers) -> None:
    server = servers.nbdkit("memory", "1M", tcp=True)
    port = server.uri.rpartition(":")[2]
    assert export(f"nbd://[::1]:{port}") == expected("1m:0")
    assert export(f"nbd://127.0.0.1:{port}") == expected("1m:0")


def test_a_port_where_nobody_listens(imgsum: Imgsum) -> None:
    result = imgsum("checksum", "nbd://[::1]:1/")
    assert (result.status, result.text) == (2, "")
    assert result.errors.startswith("imgsum: nbd://[::1]:1/: connect: ")
    assert result.errors.endswith("Connection refused\n")


def test_a_host_that_is_not_known(imgsum: Imgsum) -> None:
    result = imgsum("checksum", "nbd://host.invalid/")
    assert result.status == 2
    assert result.errors.startswith("imgsum: nbd://host.invalid/: getaddrinfo: ")


def test_vsock() -> None:
    """As far as that goes without a guest or a host: it is no file, and nobody answers."""
    reason = (
        r"^nbd\+vsock://1:1/: (connect: |socket: .*Address family|the NBD server was not ready within 0.5 seconds$)"
    )
    with pytest.raises(OpenError, match=reason):
        export("nbd+vsock://1:1/", connect_timeout=0.5)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nbd:unix:/run/x.sock", "nbd+unix:///?socket=/run/x.sock"),
        ("nbd:unix:/run/x:exportname=a", "nbd+unix:///a?socket=/run/x"),
        ("nbd:host:10809", "nbd://host:10809/"),
        ("nbd:host:10809:exportname=a", "nbd://host:10809/a"),
        ("nbd:///x?socket=/run/x", "nbd+unix:///?socket="),
        ("nbd+unix:///", "socket"),
        ("nbd+ssh://host/", "nbd+unix:///"),
        ("nbd:/run/x", "nbd+unix:///"),
    ],
)
def test_the_right_scheme_is_told(imgsum: Imgsum, name: str, hint: str) -> None:
    result = imgsum("checksum", name)
    assert result.status == 2
    assert result.errors.startswith(f"imgsum: {name}: ")
    assert hint in result.errors.removeprefix(f"imgsum: {name}: ")
    assert result.errors.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("http://host/disk.img", "[ nbdkit -r curl http://host/disk.img ]"),
        ("HTTPS://host/disk.img", "[ nbdkit -r curl HTTPS://host/disk.img ]"),
        ("ssh://me@host/var/disk.img", "[ nbdkit -r ssh host=host user=me /var/disk.img ]"),
        ("s3://bucket/disk.img", "download it"),
        ("gs://bucket/disk.img", "download it"),
        ("az://container/disk.img", "download it"),
        ("rbd:pool/image", "qemu-nbd"),
        ("iscsi://host/target/0", "qemu-nbd"),
        ("json:{}", "qemu-nbd"),
        ("file:///disk.img", "without file://"),
    ],
)
def test_what_to_do_about_other_uris(imgsum: Imgsum, name: str, hint: str) -> None:
    result = imgsum("checksum", name)
    assert (result.status, result.text) == (2, "")
    assert result.errors.startswith(f"imgsum: {name}: ")
    assert hint in result.errors.removeprefix(f"imgsum: {name}: ")
    assert result.errors.count("\n") == 1


def test_a_file_with_a_name_like_a_uri(imgsum: Imgsum, tmp_path: Path) -> None:
    for name in ("nbd:unix:x", "nbd+x", "json:{}"):
        (tmp_path / name).write_bytes(reference.content("1000:A"))
        result = imgsum("checksum", "-q", name, cwd=tmp_path)
        assert result.text == f"{expected('1000:A')}  {name}\n"


def test_an_export_has_no_format(servers: Servers) -> None:
    server = servers.nbdkit("memory", "1M")
    with pytest.raises(UsageError, match="can't be read as qcow2"):
        export(server.uri, format="qcow2")
    assert export(server.uri, format="raw") == expected("1m:0")


def test_max_size(servers: Servers) -> None:
    server = servers.nbdkit("memory", "1M")
    assert export(server.uri, max_size=MIB) == expected("1m:0")
    with pytest.raises(Error, match="has 1048576 bytes of content, more than the 1048575 of --max-size"):
        export(server.uri, max_size=MIB - 1)


# --- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A directory with a CA, a server's and a client's certificate, made by certtool."""
    certtool = find_tool("certtool")
    ca = "cn = Test CA\nca\ncert_signing_key\n"
    server = (
        "cn = localhost\ndns_name = localhost\nip_address = 127.0.0.1\ntls_www_server\nencryption_key\nsigning_key\n"
    )
    client = "cn = client\ntls_www_client\nencryption_key\nsigning_key\n"
    for name, template in (("ca", ca), ("server", server), ("client", client)):
        (tmp_path / f"{name}.template").write_text(template)
        key, certificate = tmp_path / f"{name}-key.pem", tmp_path / f"{name}-cert.pem"
        run(certtool, "--generate-privkey", "--key-type=ecdsa", f"--outfile={key}")
        words = [f"--load-privkey={key}", f"--template={tmp_path / name}.template", f"--outfile={certificate}"]
        if name == "ca":
            run(certtool, "--generate-self-signed", *words)
        else:
            signer = [
                f"--load-ca-certificate={tmp_path / 'ca-cert.pem'}",
                f"--load-ca-privkey={tmp_path / 'ca-key.pem'}",
            ]
            run(certtool, "--generate-certificate", *words, *signer)
    return tmp_path


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def test_tls_with_certificates(servers: Servers, image: Image, certificates: Path, tmp_path: Path) -> None:
    words = ["--tls=require", f"--tls-certificates={certificates}", "file", image(SPEC)]
    uri = servers.nbdkit(*words, tcp=True).uri.replace("nbd:", "nbds:")
    got = checksum(f"{uri}?tls-certificates={certificates}")
    assert got.hexdigest == expected(SPEC)
    assert got.stats.details["nbd_tls"] is True
    with pytest.raises(
        Error
    ):  # without a CA: the system's, which doesn't know this one; or refused, with an old libnbd
        export(uri)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(OpenError, match=r"no ca-cert.pem in "):
        export(f"{uri}?tls-certificates={other}")
    shutil.copy(certificates / "client-cert.pem", other / "ca-cert.pem")
    with pytest.raises(OpenError, match="certificate"):
        export(f"{uri}?tls-certificates={other}")


def test_tls_over_a_unix_socket_with_psk(servers: Servers, image: Image, tmp_path: Path) -> None:
    keys = tmp_path / "keys.psk"
    run(find_tool("psktool"), "-u", "alice", "-p", str(keys))
    server = servers.nbdkit("--tls=require", f"--tls-psk={keys}", "file", image(SPEC))
    uri = server.uri.replace("nbd+unix:///", "nbds+unix://alice@/")
    assert export(f"{uri}&tls-psk-file={keys}") == expected(SPEC)
    words = [
        "--filter=multi-conn",
        "--tls=require",
        f"--tls-psk={keys}",
        "file",
        image(SPEC),
        "multi-conn-mode=disable",
    ]
    shared = servers.nbdkit(*words).uri.replace("nbd+unix:///", "nbds+unix://alice@/")
    assert export(f"{shared}&tls-psk-file={keys}", request_size=64 * KIB) == expected(SPEC)
    wrong = tmp_path / "wrong.psk"
    run(find_tool("psktool"), "-u", "alice", "-p", str(wrong))
    with pytest.raises(OpenError):
        export(f"{uri}&tls-psk-file={wrong}")


def test_tls_is_never_downgraded(servers: Servers, certificates: Path) -> None:
    """CVE-2019-14842 and its kind: nbds to a server without TLS."""
    for words in (["--tls=off"], ["--tls=off", "--oldstyle"], ["--tls=off", "--mask-handshake=0"]):
        server = servers.nbdkit(*words, "memory", "1M", log=True)
        with pytest.raises(OpenError):
            export(server.uri.replace("nbd+unix", "nbds+unix") + f"&tls-certificates={certificates}")
        assert not server.log.exists() or server.requests("Read") == []


def test_without_tls_to_a_server_that_requires_it(servers: Servers, tmp_path: Path) -> None:
    keys = tmp_path / "keys.psk"
    run(find_tool("psktool"), "-u", "alice", "-p", str(keys))
    server = servers.nbdkit("--tls=require", f"--tls-psk={keys}", "memory", "1M")
    with pytest.raises(OpenError, match="TLS"):
        export(server.uri)


# --- libnbd ---------------------------------------------------------------------------------------------------------


def test_libnbd_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nbd", None)
    with pytest.raises(MissingError, match="not installed: the Python that runs imgsum is ") as error:
        export("nbd://localhost/")
    assert sys.executable in error.value.reason
    for command in ("apt install python3-libnbd", "pipx install", "uv venv", "--system-site-packages"):
        assert command in error.value.reason


@pytest.mark.parametrize(
    "reason",
    [
        "libnbd.so.0: failed to map segment from shared object",
        "libnbd.so.0: cannot allocate memory in static TLS block",
    ],
)
def test_memory_is_short(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    class Short:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "nbd":
                raise ImportError(reason)

    monkeypatch.delitem(sys.modules, "nbd", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Short(), *sys.meta_path])
    with pytest.raises(OpenError, match="memory is short"):
        export("nbd://localhost/")


def test_another_package_is_called_nbd(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's `nbd` is about something else."""
    module = types.ModuleType("nbd")
    module.__file__ = "/somewhere/nbd/__init__.py"
    monkeypatch.setitem(sys.modules, "nbd", module)
    with pytest.raises(MissingError, match=r"/somewhere/nbd/__init__.py\) is another package: .*python3-libnbd"):
        export("nbd://localhost/")


def test_libnbd_is_not_imported_for_other_images(image: Image) -> None:
    code = (
        "import sys, imgsum; imgsum.checksum(sys.argv[1]); sys.exit('nbd' in sys.modules or 'libnbdmod' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(image("64k:R"))], check=True)


@pytest.mark.parametrize(
    ("version", "verifies"),
    [
        ((1, 14, 2), False),
        ((1, 18, 4), False),
        ((1, 18, 5), True),
        ((1, 19, 9), False),
        ((1, 20, 1), False),
        ((1, 20, 2), True),
        ((1, 22, 0), True),
        ((2, 0, 0), True),
    ],
)
def test_versions_that_verify_by_the_systems_certificates(version: tuple[int, ...], verifies: bool) -> None:
    assert tls._verifies(version) == verifies
