"""The schema of ``test_schema.py`` as it was written for pydantic 1."""

from pydantic.v1 import BaseModel, StrictFloat, StrictInt, validator

from shoal.dht.schema import BytesWithPublicKey, conbytes


class Status(BaseModel):
    epoch: StrictInt
    speed: StrictFloat


class SampleSchema(BaseModel):
    experiment_name: bytes
    n_batches: dict[bytes, StrictInt]
    signed_data: dict[BytesWithPublicKey, bytes]
    status: dict[str, Status | None]
    pair: tuple[StrictInt, str]
    even: StrictInt

    @validator("even", always=True)
    def check_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value


class Constrained(BaseModel):
    name: conbytes(strict=True, regex=rb"[a-z]+\Z", max_length=3)  # type: ignore[valid-type]
    anything: conbytes()  # type: ignore[valid-type]
