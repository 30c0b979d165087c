"""The protobuf messages of the Tinker wire protocol, built from a table.

They have their own descriptor pool, so that one process can import this package and the `tinker`
SDK, in any versions. The field numbers are the protocol; the names equal the SDK's by convention.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "skyrl_actors_tinker"
Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "uint32": Field.TYPE_UINT32,
    "double": Field.TYPE_DOUBLE,
    "bool": Field.TYPE_BOOL,
}
ENUMS = {
    "StopReason": ("STOP", "LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16"),
}
# message -> "number name type"
# "*" repeated, "?" optional, "|" member of the message's oneof, "map<K,V>" a map
MESSAGES: dict[str, tuple[str, ...]] = {
    "EncodedTextChunk": ("1 tokens bytes",),
    "ImageDimensions": ("1 width uint32", "2 height uint32"),
    "ImageChunk": (
        "1 data bytes",
        "2 format string",
        "3 expected_tokens ?int32",
        "4 override_dimensions ?ImageDimensions",
    ),
    "DmelChunk": ("1 dmel bytes",),
    "Chunk": ("1 encoded_text |EncodedTextChunk", "2 image |ImageChunk", "3 dmel |DmelChunk"),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense |bytes", "2 sparse_csr |SparseCsr", "3 dtype DType", "4 shape *int64"),
    "LossConfigValue": ("1 number |double", "2 text |string"),
    # The provenance spans of a datum (3, 4) have no effect; see `without_effect`.
    "Datum": ("1 model_input *Chunk", "2 loss_fn_inputs map<string,Tensor>"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data *Datum",
        "4 loss_fn string",
        "5 loss_fn_config map<string,double>",
        "6 forward_only bool",
        "7 loss_fn_config_v2 map<string,LossConfigValue>",
    ),
    # The same message without the rest, for who needs only its model.
    "ModelOfRequest": ("1 model_id string",),
    "BatchedTensor": (
        "1 data bytes",
        "2 offsets bytes",
        "3 dtype DType",
        "4 trailing_shape *int64",
    ),
    "ArrayRecord": (
        "1 type_tag string",
        "2 fields map<string,BatchedTensor>",
        "3 num_datums int64",
    ),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs *ArrayRecord",
        "3 metrics map<string,double>",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SampledSequence": (
        "1 stop_reason StopReason",
        "2 tokens bytes",
        "3 logprobs ?bytes",
        "4 topk_sampled_logprobs ?TopkLogprobs",
    ),
    "SampleResponse": (
        "1 sequences *SampledSequence",
        "2 prompt_logprobs ?bytes",
        "3 topk_prompt_logprobs ?TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
        "5 target_prompt_logprobs ?Tensor",
        "6 prompt_alt_tokens ?PromptAltTokens",
    ),
    "PromptAltTokens": ("1 tokens Tensor", "2 logprobs Tensor"),
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="skyrl_actors/tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        _add_message(file, name, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


def _add_message(
    file: descriptor_pb2.FileDescriptorProto, name: str, fields: tuple[str, ...]
) -> None:
    message = file.message_type.add(name=name)
    optional: list[descriptor_pb2.FieldDescriptorProto] = []
    for text in fields:
        number, field_name, kind = text.split(" ", 2)
        field = message.field.add(name=field_name, number=int(number), label=Field.LABEL_OPTIONAL)
        if kind.startswith("map<"):
            key, value = kind[4:-1].split(",")
            entry = message.nested_type.add(name=f"{field_name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            for i, part in enumerate((key, value), start=1):
                _set_type(
                    entry.field.add(
                        name=("key", "value")[i - 1], number=i, label=Field.LABEL_OPTIONAL
                    ),
                    part,
                )
            field.label, field.type = Field.LABEL_REPEATED, Field.TYPE_MESSAGE
            field.type_name = f".{PACKAGE}.{name}.{entry.name}"
            continue
        mark, bare = (kind[0], kind[1:]) if kind[0] in "*?|" else ("", kind)
        _set_type(field, bare)
        if mark == "*":
            field.label = Field.LABEL_REPEATED
        elif mark == "|":
            if not message.oneof_decl:
                message.oneof_decl.add(name="kind")
            field.oneof_index = 0
        elif mark == "?":
            optional.append(field)
    for field in optional:  # proto3 optional fields have their own oneofs, after the real ones
        message.oneof_decl.add(name=f"_{field.name}")
        field.oneof_index, field.proto3_optional = len(message.oneof_decl) - 1, True


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type = Field.TYPE_ENUM if kind in ENUMS else Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


_CLASSES = _build()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ModelOfRequest: Any = _CLASSES["ModelOfRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
FLOAT32, INT64, INT32 = 1, 2, 3
STOP, LENGTH = 0, 1
