#!/usr/bin/env python3
"""Records tests/fixtures/finetune/parquet with pyarrow: data as JSON lines (NAME.jsonl), and the same rows as Parquet files
(NAME.parquet, or NAME.HOW.parquet for each way of writing). Files that must be rejected are in the subfolder refused/.

usage: record_parquet.py tests/fixtures/finetune/parquet

Needs pyarrow (26.0.1 was used).
"""
import base64
import datetime
import decimal
import json
import math
import pathlib
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

FOLDER = pathlib.Path(sys.argv[1])
(FOLDER / "refused").mkdir(parents=True, exist_ok=True)


def write_lines(name, rows):
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    (FOLDER / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))


def write(name, table, **options):
    if not isinstance(table, pa.Table):
        columns = {key: None for row in table for key in row}
        table = pa.Table.from_pylist([{**columns, **row} for row in table])
    pq.write_table(table, FOLDER / f"{name}.parquet", **{"write_statistics": False, **options})


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


# Conversations of several lengths. Some call a tool, and each tool has different arguments. Keys that are missing in JSON lines are
# null in Parquet.
WORDS = "Ein Fluß, 你好, naïve “quotes”, a\ttab, and\nlines 😀 of words that repeat and repeat".split(" ")
CHATS = []
for i in range(40):
    turns = [turn("system", "Be brief.")] if i % 5 == 0 else []
    for j in range(i % 4 + 1):
        turns.append(turn("user", " ".join(WORDS[(i * 3 + j) % 7 :][: 3 + (i + j) % 9])))
        turns.append(turn("assistant", " ".join(WORDS[(i + 5 * j) % 11 :][: 2 + i % 4]) or "Yes."))
    row = {"messages": turns}
    if i % 8 == 3:
        arguments = {"city": "Köln", "days": i} if i % 16 == 3 else {"amount": i / 8, "exact": True, "to": ["EUR", "JPY"]}
        name = "weather" if i % 16 == 3 else "convert"
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turns += [turn("assistant", "", tool_calls=[call]), turn("tool", "done", name=name), turn("assistant", "There.")]
        row["tools"] = [{"type": "function", "function": {"name": name, "description": "Knows."}}]
    CHATS.append(row)
write_lines("chats", CHATS)
write("chats.snappy", CHATS, compression="snappy", row_group_size=7)
write("chats.zstd", CHATS, compression="zstd", data_page_version="2.0", data_page_size=256, write_batch_size=4,
      use_dictionary=False, row_group_size=30)
write("chats.gzip", CHATS, compression="gzip", data_page_size=200, write_batch_size=1, write_page_checksum=True)
write("chats.lz4", CHATS, compression="lz4", use_dictionary=False, use_byte_stream_split=False,
      column_encoding={"messages.list.element.role": "DELTA_BYTE_ARRAY",
                       "messages.list.element.content": "DELTA_LENGTH_BYTE_ARRAY"})
write("chats.plain", CHATS, compression="none", use_compliant_nested_type=False, version="1.0")
# Messages as JSON text, as in tables that have only text columns.
write("chats.text", [{**row, "messages": json.dumps(row["messages"], ensure_ascii=False)} for row in CHATS])

# A file for each record format, with additional columns whose types and compressions are not supported.
FORMS = {
    "sharegpt": [{"id": i, "conversations": [{"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": "Yes."}],
                  "system": "Be kind." if i % 2 else None} for i in range(6)],
    "completion": [{"prompt": f"{i}+{i}=", "completion": str(2 * i), "image": bytes(range(i)), "score": i / 3,
                    "price": decimal.Decimal(i) / 8} for i in range(20)],
    "completion_of_messages": [{"prompt": [turn("user", f"Say {i}")], "completion": [turn("assistant", str(i))]}
                               for i in range(3)],
    "alpaca": [{"instruction": "Add.", "input": f"{i} and 1" if i % 2 else None, "output": str(i + 1)} for i in range(5)],
    "text": [{"text": f"Text {i}. " * i, "url": "x"} for i in range(1, 6)],
    "preference": [{"prompt": f"{i}?", "chosen": " yes", "rejected": " no"} for i in range(4)],
    "preference_of_messages": [{"chosen": [turn("user", f"{i}?"), turn("assistant", "yes")],
                                "rejected": [turn("user", f"{i}?"), turn("assistant", "no")]} for i in range(4)],
    "label": [{"text": f"text {i}", "label": i % 3} for i in range(9)],
    "label_of_text": [{"text": f"text {i}", "label": ["good", "bad"][i % 2]} for i in range(9)],
    "label_of_bool": [{"text": f"text {i}", "label": i % 2 == 0} for i in range(4)],
    # pandas writes integer columns with missing values in this form.
    "label_with_gaps": [{"text": f"text {i}", "label": math.nan if i == 2 else float(i % 2)} for i in range(5)],
}
for name, rows in FORMS.items():
    table = pa.Table.from_pylist(rows)
    if "label" in name:
        # Categories, as in pandas, and small integers.
        table = table.set_column(1, "label", pa.compute.dictionary_encode(table["label"]) if "text" in name else table["label"])
    if name == "label":
        table = table.set_column(1, "label", table["label"].cast(pa.int8()))
    keys = [key for key in rows[0] if key not in ("image", "price")]
    codecs = {column: "brotli" if column == "image" else "snappy" for column in table.column_names}
    codecs = "snappy" if any(pa.types.is_nested(field.type) for field in table.schema) else codecs
    write_lines(name, [{key: None if row[key] != row[key] else row[key] for key in keys} for row in rows])
    write(name, table, compression=codecs)

# A value of each type in a message, and its value in JSON lines.
KINDS = {
    "i8": (pa.int8(), -8), "i16": (pa.int16(), -1600), "i32": (pa.int32(), -(2**31)), "i64": (pa.int64(), -(2**63)),
    "u8": (pa.uint8(), 200), "u16": (pa.uint16(), 60000), "u32": (pa.uint32(), 2**32 - 1), "u64": (pa.uint64(), 2**64 - 1),
    "f16": (pa.float16(), 0.5), "f32": (pa.float32(), 0.25), "f64": (pa.float64(), 0.1), "truth": (pa.bool_(), True),
    "large": (pa.large_string(), "large"), "nothing": (pa.null(), None),
    "category": (pa.dictionary(pa.int32(), pa.string()), "one"), "date": (pa.date32(), datetime.date(1970, 1, 3), 2),
    "time": (pa.time32("ms"), datetime.time(0, 0, 1), 1000), "micros": (pa.time64("us"), datetime.time(0, 0, 1), 1000000),
    "stamp": (pa.timestamp("ms"), datetime.datetime(1970, 1, 1, 0, 0, 2), 2000),
    "stamp_us": (pa.timestamp("us", "UTC"), datetime.datetime(1970, 1, 1, 0, 0, 2, tzinfo=datetime.timezone.utc), 2000000),
    "stamp_ns": (pa.timestamp("ns"), datetime.datetime(1970, 1, 1, 0, 0, 2), 2000000000),
    "lists": (pa.list_(pa.list_(pa.int32())), [[1, 2], [], [3]]), "gaps": (pa.list_(pa.string()), ["a", None, ""]),
    "empty": (pa.list_(pa.string()), []), "fixed": (pa.list_(pa.int64(), 2), [5, 6]),
    "map": (pa.map_(pa.string(), pa.list_(pa.int8())), [("a", [1]), ("b", [])], {"a": [1], "b": []}),
    "numbered": (pa.map_(pa.int32(), pa.string()), [(7, "seven"), (8, None)], {"7": "seven", "8": None}),
    "struct": (pa.struct([("a", pa.struct([("b", pa.list_(pa.struct([("c", pa.int32()), ("d", pa.string())])))]))]),
               {"a": {"b": [{"c": 1, "d": "x"}, {"c": 2, "d": None}, None]}},
               {"a": {"b": [{"c": 1, "d": "x"}, {"c": 2}, None]}}),
}
message = pa.struct([("role", pa.string())] + [(name, kind[0]) for name, kind in KINDS.items()])
schema = pa.schema([("messages", pa.list_(message))])
empty_message = {"role": "user"}
parquet_rows = [[{"role": "user", **{name: kind[1] for name, kind in KINDS.items()}}, empty_message], [empty_message], [], None]
line_values = {name: kind[-1] for name, kind in KINDS.items() if kind[-1] is not None}
line_rows = [[{"role": "user", **line_values}, empty_message], [empty_message], [], None]
write("kinds", pa.Table.from_pylist([{"messages": row} for row in parquet_rows], schema=schema))
write_lines("kinds", [{"messages": row} for row in line_rows])

# Files that must be rejected.
text = pa.table({"text": ["a", "b"], "label": [1, 2]})
write("refused/binary", pa.table({"text": [b"a"]}))
write("refused/image", [{"messages": [turn("user", [{"type": "image", "image": {"bytes": b"a", "path": "x"}}])]}])
write("refused/decimal", pa.table({"text": ["a"], "label": [decimal.Decimal("1.5")]}))
write("refused/int96", pa.table({"text": pa.array([datetime.datetime(2020, 1, 1)])}), use_deprecated_int96_timestamps=True)
write("refused/brotli", text, compression="brotli")
write("refused/unknown", pa.table({"question": ["a"], "answer": ["b"], "id": [1]}))
write("refused/no_rows", text.slice(0, 0))
write("refused/no_columns", pa.table({}))


class Keys(pe.KmsClient):
    """A key service that wraps keys by encoding them, without encryption."""

    def __init__(self, _):
        pe.KmsClient.__init__(self)

    def wrap_key(self, key_bytes, master_key_identifier):
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key, master_key_identifier):
        return base64.b64decode(wrapped_key)


for name, plain in [("encrypted", False), ("encrypted_columns", True)]:
    config = pe.EncryptionConfiguration(footer_key="f", column_keys={"c": ["text"]}, plaintext_footer=plain)
    properties = pe.CryptoFactory(Keys).file_encryption_properties(pe.KmsConnectionConfig(), config)
    write(f"refused/{name}", text, encryption_properties=properties)
