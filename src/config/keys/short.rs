//! Short names for the tables.

pub(super) use super::key::Kind::{
    Any, AutoOr, Betas, Bool, OneOf, OneOfAnyCase, Section as Object, Str, Strings, StringsOrOne,
};
pub(super) use super::key::Status::{Honoured as H, OfRefused as R, OfSection as S};
pub(super) use super::key::{Kind, Section, Status, keys};
pub(super) const INT: Kind = Kind::Int(i64::MIN, i64::MAX);
pub(super) const COUNT: Kind = Kind::Int(0, i64::MAX);
pub(super) const POSITIVE: Kind = Kind::Int(1, i64::MAX);
pub(super) const FLOAT: Kind = Kind::Float(f64::MIN, f64::MAX);
pub(super) const NOT_NEGATIVE: Kind = Kind::Float(0.0, f64::MAX);
pub(super) const RATE_PER_GROUP: Kind = Kind::PerGroup(0.0, f64::MAX);
pub(super) const SHARE: Kind = Kind::Float(0.0, 1.0);
pub(super) const DTYPE: Kind = OneOfAnyCase(&["fp32", "fp16", "bf16"]);

pub(super) const fn none(why: &'static str) -> Status {
    Status::NoEffect(why)
}
pub(super) const fn as_every_unit(why: &'static str) -> Status {
    Status::AsEveryUnit(why)
}
pub(super) const fn refuse(why: &'static str) -> Status {
    Status::Refused(why)
}
pub(super) const fn above1(why: &'static str) -> Status {
    Status::RefusedAbove1(why)
}
pub(super) const fn gone(why: &'static str) -> Status {
    Status::Removed(why)
}
pub(super) const fn gone_unless_off(why: &'static str) -> Status {
    Status::RemovedUnlessOff(why)
}
pub(super) const fn moved(to: &'static str) -> Status {
    Status::Moved(to)
}
