# find_package(hmoe) gives hmoe::hmoe (shared), hmoe::hmoe_static and hmoe::hmoe_aclnn.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/hmoe_targets.cmake)
