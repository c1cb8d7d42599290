import grpc
import pytest

from kvstore import errors
from kvstore.rpc.errors import CODE_OF, error_of, status_code_of


def every_error():
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.LarderError) and value not in (errors.LarderError, errors.ConfigError)
    ]


class Failed(grpc.RpcError):
    def __init__(self, code, details="why"):
        self._code, self._details = code, details

    def code(self):
        return self._code

    def details(self):
        return self._details


@pytest.mark.parametrize("error", every_error())
def test_every_error_that_a_caller_can_get_has_a_code_that_leads_back_to_it(error):
    back = error_of(Failed(status_code_of(error("why"))))
    assert type(back) is error
    assert "why" in str(back)


def test_no_two_errors_share_a_code():
    assert len(set(CODE_OF.values())) == len(CODE_OF)


def test_a_subclass_has_the_code_of_the_class_above_it():
    class RegistryAway(errors.Unavailable):
        pass

    assert status_code_of(RegistryAway("x")) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("code", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN])
def test_a_code_without_a_row_means_use_another_peer(code):
    assert type(error_of(Failed(code))) is errors.Unavailable
