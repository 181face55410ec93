"""Proto tooling: small hand-made contracts that break one rule each, and our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.proto_breaking import breaking_changes
from tools.proto_compiler import ProtoError, compile_descriptors, without_source
from tools.proto_lint import lint
from tools.protos import main

REPOSITORY = Path(__file__).resolve().parents[2]

GOOD = """\
syntax = "proto3";

package shop.v1;

// Sells.
service OrderService {
  // Places an order.
  rpc Place(PlaceRequest) returns (PlaceResponse);
  // Follows an order.
  rpc Watch(WatchRequest) returns (stream WatchResponse);
}

// Asks for an order.
message PlaceRequest {
  // What is bought.
  string item = 1;
  // How often; absent means 1.
  optional uint32 count = 2;
  // Ids of vouchers.
  repeated uint32 voucher_ids = 3;
  // How it is paid.
  oneof payment {
    // By card.
    string card = 4;
    // In coins.
    uint64 coins = 5;
  }
  // Prices by currency.
  map<string, uint32> prices = 6;
  // Where to.
  Address address = 7;
  reserved 20, 30 to 40;
  reserved "gift";

  // Where someone lives.
  message Address {
    // Of the house.
    string street = 1;
  }
}

// Answers with a number.
message PlaceResponse {
  // The order's number.
  uint64 order_id = 1;
}

// Asks for news.
message WatchRequest {
  // The order's number.
  uint64 order_id = 1;
}

// News.
message WatchResponse {
  // What it is doing.
  OrderState state = 1;
}

// What an order is doing.
enum OrderState {
  // Refused.
  ORDER_STATE_UNSPECIFIED = 0;
  // On its way.
  ORDER_STATE_SENT = 1;
  // There.
  ORDER_STATE_ARRIVED = 2;
}
"""


def write_proto(root: Path, text: str, name: str = "shop/v1/order.proto") -> Path:
    file = root / "proto" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return root / "proto"


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, f"{old!r} must be there once"
    return GOOD.replace(old, new)


def test_good_style_has_no_findings(tmp_path: Path) -> None:
    assert lint(compile_descriptors(write_proto(tmp_path, GOOD))) == ()


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("package shop.v1;", "package store.v1;", ":3: package store.v1 is not its directory"),
        ("// Sells.\n", "", ": service OrderService has no comment"),
        ("  // Places an order.\n", "", ":7: rpc OrderService.Place has no comment"),
        ("// Asks for an order.\n", "", ": message PlaceRequest has no comment"),
        ("  // What is bought.\n", "", "order.proto:15: field PlaceRequest.item has no comment"),
        ("  // How it is paid.\n", "", ": oneof PlaceRequest.payment has no comment"),
        ("    // By card.\n", "", ": field PlaceRequest.card has no comment"),
        ("    // Of the house.\n", "", ": field Address.street has no comment"),
        ("  // Where someone lives.\n", "", ": message Address has no comment"),
        ("// What an order is doing.\n", "", ": enum OrderState has no comment"),
        ("  // On its way.\n", "", ": enum value ORDER_STATE_SENT has no comment"),
        ("service OrderService", "service Orders", "service Orders does not end in Service"),
        ("rpc Place(", "rpc place(", "rpc OrderService.place is not PascalCase"),
        ("string item =", "string itemName =", "field PlaceRequest.itemName is not lower_snake"),
        ("oneof payment", "oneof Payment", "oneof PlaceRequest.Payment is not lower_snake_case"),
        ("ORDER_STATE_SENT =", "SENT =", "enum value SENT lacks prefix ORDER_STATE_"),
        ("ORDER_STATE_SENT =", "ORDER_STATE_Sent =", "ORDER_STATE_Sent is not UPPER_SNAKE_CASE"),
        ("STATE_UNSPECIFIED =", "STATE_NEW =", "ORDER_STATE_NEW does not end in _UNSPECIFIED"),
        (
            "rpc Watch(WatchRequest)",
            "rpc Watch(PlaceRequest)",
            "rpc OrderService.Watch uses shop.v1.PlaceRequest, not shop.v1.WatchRequest",
        ),
        (
            "rpc Watch(WatchRequest)",
            "rpc Watch(PlaceRequest)",
            "rpc OrderService.Watch shares shop.v1.PlaceRequest with OrderService.Place",
        ),
        (
            "(stream WatchResponse)",
            "(stream WatchRequest)",
            "rpc OrderService.Watch shares shop.v1.WatchRequest with OrderService.Watch",
        ),
        ("voucher_ids = 3;", "voucher_ids = 3 [packed = false];", "voucher_ids is not packed"),
    ],
)
def test_each_style_rule(tmp_path: Path, old: str, new: str, finding: str) -> None:
    findings = lint(compile_descriptors(write_proto(tmp_path, changed(old, new))))
    assert any(finding in text for text in findings), findings
    assert all(text.startswith("shop/v1/order.proto:") for text in findings)


def test_rules_of_the_file_itself(tmp_path: Path) -> None:
    proto2 = 'syntax = "proto2";\npackage shop;\n'
    findings = lint(compile_descriptors(write_proto(tmp_path, proto2, "shop/Order.proto")))
    assert findings == (
        "shop/Order.proto:2: package shop does not end in a version",
        "shop/Order.proto:1: file name Order.proto is not lower_snake_case",
        "shop/Order.proto:1: syntax is not proto3",
    )


def compare(tmp_path: Path, present: str) -> tuple[str, ...]:
    before = compile_descriptors(write_proto(tmp_path / "before", GOOD))
    after = compile_descriptors(write_proto(tmp_path / "after", present))
    return breaking_changes(without_source(before), after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// Sells.", "// Sells everything."),
        ("  uint64 order_id = 1;\n}\n\n// Asks for news", "  uint64 order_id = 1;\n  // x\n"
         "  string note = 2;\n}\n\n// Asks for news"),
        ("  ORDER_STATE_ARRIVED = 2;", "  ORDER_STATE_ARRIVED = 2;\n  ORDER_STATE_LOST = 3;"),
        ("  // Follows an order.\n", "  rpc Cancel(WatchRequest) returns (WatchResponse);\n"),
        ("reserved 20, 30 to 40;", "reserved 20 to 35, 36 to 40, 50;"),
        ("message PlaceResponse", "message Extra {}\n\n// Answers.\nmessage PlaceResponse"),
    ],
)  # fmt: skip
def test_adding_does_not_break(tmp_path: Path, old: str, new: str) -> None:
    assert compare(tmp_path, changed(old, new)) == ()


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("  string item = 1;\n", "", "field shop.v1.PlaceRequest.item (number 1) was removed"),
        (
            "  string item = 1;\n",
            "  reserved 1;\n",
            "field shop.v1.PlaceRequest.item (number 1) was removed",
        ),
        ("string item = 1", "string item = 9", "PlaceRequest.item has number 9, not 1"),
        ("string item = 1", "string goods = 1", "name is goods, not item as released"),
        ("string item = 1", "bytes item = 1", "type is bytes, not string as released"),
        ("string item = 1", "repeated string item = 1", "label is repeated, not singular"),
        ("string item = 1", "optional string item = 1", "presence is explicit, not implicit"),
        ("optional uint32 count", "uint32 count", "presence is implicit, not explicit"),
        ("voucher_ids = 3;", "voucher_ids = 3 [packed = false];", "packing is unpacked"),
        ("item = 1;", 'item = 1 [json_name = "Item"];', "JSON name is Item, not item"),
        ("oneof payment", "oneof paid_by", "oneof is paid_by, not payment"),
        (
            "map<string, uint32> prices",
            "map<string, uint64> prices",
            "PricesEntry.value (number 2)",
        ),
        ("Address address = 7", "WatchRequest address = 7", "type is shop.v1.WatchRequest"),
        ("message Address", "message Home {}\n  message Address", ""),
        ("    string street = 1;\n", "", "field shop.v1.PlaceRequest.Address.street (number 1)"),
        ("reserved 20, 30 to 40;", "reserved 20, 30 to 39;", "no longer reserves number 40"),
        ("reserved 20, 30 to 40;", "reserved 30 to 40;", "no longer reserves number 20"),
        ('  reserved "gift";\n', "", 'no longer reserves name "gift"'),
        ("  ORDER_STATE_ARRIVED = 2;\n", "", "ORDER_STATE_ARRIVED (number 2) was removed"),
        ("_ARRIVED = 2", "_ARRIVED = 7", "ORDER_STATE_ARRIVED has number 7, not 2"),
        ("_ARRIVED = 2", "_THERE = 2", "ORDER_STATE_ARRIVED (number 2) is now ORDER_STATE_THERE"),
        ("service OrderService", "service ShopService", "service shop.v1.OrderService was removed"),
        (
            "  rpc Place(PlaceRequest) returns (PlaceResponse);\n",
            "",
            "rpc shop.v1.OrderService.Place was removed",
        ),
        ("(PlaceRequest)", "(WatchRequest)", "request is shop.v1.WatchRequest, not shop.v1.Place"),
        ("(PlaceResponse)", "(WatchResponse)", "response is shop.v1.WatchResponse, not shop.v1.P"),
        ("rpc Place(", "rpc Place(stream ", "client streaming is True, not False"),
        ("returns (stream ", "returns (", "server streaming is False, not True"),
    ],
)
def test_each_change_that_breaks(tmp_path: Path, old: str, new: str, finding: str) -> None:
    findings = compare(tmp_path, changed(old, new))
    if finding:
        assert any(finding in text for text in findings), findings
    else:
        assert findings == ()


def test_whole_messages_and_enums(tmp_path: Path) -> None:
    renamed = GOOD.replace("OrderState", "State").replace("WatchRequest", "FollowRequest")
    findings = compare(tmp_path, renamed)
    assert "message shop.v1.WatchRequest was removed" in findings
    assert "enum shop.v1.OrderState was removed" in findings


def test_moving_to_another_file_of_the_package_is_allowed(tmp_path: Path) -> None:
    before = compile_descriptors(write_proto(tmp_path / "before", GOOD))
    after = compile_descriptors(write_proto(tmp_path / "after", GOOD, "shop/v1/moved.proto"))
    assert breaking_changes(before, after) == ()


def make_repository(root: Path) -> None:
    """A repository whose contracts are generated, released and clean."""
    text = GOOD.replace("package shop.v1", "package stagemesh.v1")
    write_proto(root, text, "stagemesh/v1/order.proto")
    assert main(["generate", "--root", str(root)]) == 0
    assert main(["release", "--root", str(root)]) == 0


def test_generate_is_repeatable_and_drift_sees_every_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_repository(tmp_path)
    stubs = tmp_path / "stagemesh" / "v1"
    names = {path.name for path in stubs.iterdir()}
    assert names == {"order_pb2.py", "order_pb2.pyi", "order_pb2_grpc.py"}
    first = {path.name: path.read_bytes() for path in stubs.iterdir()}
    assert main(["drift", "--root", str(tmp_path)]) == 0

    (stubs / "order_pb2.py").write_text("# changed by hand\n")
    (stubs / "order_pb2.pyi").unlink()
    (stubs / "gone_pb2.py").touch()
    (stubs / "__init__.py").touch()
    assert main(["drift", "--root", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "stagemesh/v1/gone_pb2.py has no .proto file any more",
        "stagemesh/v1/order_pb2.py differs from what its .proto file gives",
        "stagemesh/v1/order_pb2.pyi is missing",
    ]

    assert main(["generate", "--root", str(tmp_path)]) == 0
    assert main(["drift", "--root", str(tmp_path)]) == 0
    (stubs / "__init__.py").unlink()
    assert {path.name: path.read_bytes() for path in stubs.iterdir()} == first


def test_breaking_compares_with_the_stored_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_repository(tmp_path)
    root = ["--root", str(tmp_path)]
    assert main(["breaking", *root]) == 0
    file = tmp_path / "proto" / "stagemesh" / "v1" / "order.proto"
    file.write_text(file.read_text().replace("string item = 1", "string item = 8"))
    assert main(["breaking", *root]) == 1
    assert "has number 8, not 1 as released" in capsys.readouterr().out
    released = tmp_path / "proto" / "released" / "v1.binpb"
    for content, problem in ((b"", "is empty"), (b"\xff", "no descriptor set")):
        released.write_bytes(content)
        assert main(["breaking", *root]) == 1
        assert problem in capsys.readouterr().out
    released.unlink()
    assert main(["breaking", *root]) == 1
    assert "is missing" in capsys.readouterr().out


def test_files_that_protoc_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--root", str(tmp_path)]) == 2
    assert "there is no .proto file" in capfd.readouterr().err
    with pytest.raises(ProtoError):
        compile_descriptors(write_proto(tmp_path, "syntax = 'proto3'; message {"))
    assert "order.proto" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["lint", "drift", "breaking"])
def test_our_own_contracts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--root", str(REPOSITORY)]) == 0, capsys.readouterr().out
