from __future__ import annotations

from onebudget.device.account import Account


def test_charges_stop_at_the_ceiling_and_leave_nothing_behind() -> None:
    account = Account(10_000, others_bytes=1000)
    assert account.try_charge_blocking(4000)
    assert account.try_charge_mapped(3000)
    assert account.try_charge_tensor(2000, "a")
    assert account.free_bytes == 0
    for charge in (account.try_charge_blocking, account.try_charge_mapped, account.try_charge_tensor):
        assert not charge(1)
    assert (account.used_bytes, account.live_bytes, account.live_by_owner()) == (10_000, 2000, {"a": 2000})
    account.refund_blocking(4000)
    account.refund_mapped(3000)
    account.refund_tensor(2000, "a")
    assert (account.used_bytes, account.live_bytes, account.live_by_owner()) == (1000, 0, {})


def test_without_a_ceiling_everything_fits() -> None:
    account = Account(None)
    assert account.try_charge_blocking(2**70)
    assert account.free_bytes == 0


def test_peaks_per_owner_and_overall_fall_on_their_own_moments() -> None:
    account = Account(None)
    account.hand_out(300, "a")
    account.take_back(300, "a")
    account.hand_out(200, "b")
    account.hand_out(50, "a")
    assert account.peak_by_owner() == {"a": 300, "b": 200}
    assert account.peak_bytes == 300
    account.reset_peak()
    assert account.peak_by_owner() == {"a": 50, "b": 200}
    assert account.peak_bytes == 250
    account.take_back(200, "b")
    account.reset_peak()
    assert account.peak_by_owner() == {"a": 50}


def test_a_refund_that_meets_the_lock_is_settled_by_the_next_charge() -> None:
    account = Account(1000)
    account.try_charge_tensor(1000)
    with account.lock:
        account.refund_tensor(1000)
        assert account.used_bytes == 1000
    assert account.try_charge_tensor(1000)
    assert account.used_bytes == 1000
