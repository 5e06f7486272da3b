module {
  llvm.func @_mlir_ciface_pbk_trace(i64, i64, i64) attributes {sym_visibility = "private"}
  llvm.func @k0_body(%arg0: !llvm.ptr {llvm.noalias}, %arg1: !llvm.ptr {llvm.noalias}, %arg2: !llvm.ptr {llvm.noalias}, %arg3: i64, %arg4: i64) {
    %0 = llvm.mlir.constant(1 : i32) : i32
    %1 = llvm.mlir.constant(0 : i32) : i32
    %2 = llvm.mlir.constant(true) : i1
    %3 = llvm.mlir.constant(5.000000e+01 : f32) : f32
    %4 = llvm.mlir.constant(8 : index) : i64
    %5 = llvm.mlir.constant(dense<0xFF800000> : vector<8xf32>) : vector<8xf32>
    %6 = llvm.mlir.constant(10 : i64) : i64
    %7 = llvm.mlir.constant(0 : i64) : i64
    %8 = llvm.mlir.constant(1 : i64) : i64
    %9 = llvm.mlir.constant(2 : i64) : i64
    %10 = llvm.mlir.constant(dense<5.000000e+01> : vector<8xf32>) : vector<8xf32>
    %11 = llvm.mlir.constant(dense<2.000000e+00> : vector<8xf32>) : vector<8xf32>
    %12 = llvm.mlir.constant(1 : index) : i64
    %13 = llvm.mlir.constant(0 : index) : i64
    %14 = llvm.getelementptr %arg2[64] : (!llvm.ptr) -> !llvm.ptr, i8
    %15 = llvm.getelementptr %arg2[128] : (!llvm.ptr) -> !llvm.ptr, i8
    %16 = llvm.getelementptr %arg2[192] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.br ^bb1(%arg3 : i64)
  ^bb1(%17: i64):  // 2 preds: ^bb0, ^bb5
    %18 = llvm.icmp "slt" %17, %arg4 : i64
    llvm.cond_br %18, ^bb2, ^bb6
  ^bb2:  // pred: ^bb1
    %19 = llvm.mul %17, %4 : i64
    %20 = llvm.getelementptr %arg0[%19] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %21 = llvm.load %20 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
    %22 = llvm.fcmp "ogt" %5, %21 : vector<8xf32>
    %23 = llvm.select %22, %5, %21 : vector<8xi1>, vector<8xf32>
    %24 = llvm.fcmp "olt" %21, %10 : vector<8xf32>
    %25 = llvm.intr.vector.reduce.fmaximum(%23) {fastmathFlags = #llvm.fastmath<reassoc>} : (vector<8xf32>) -> f32
    %26 = "llvm.intr.vector.reduce.and"(%24) : (vector<8xi1>) -> i1
    llvm.store %25, %14 : f32, !llvm.ptr
    %27 = llvm.xor %26, %2 : i1
    %28 = llvm.zext %27 : i1 to i32
    llvm.store %28, %arg2 : i32, !llvm.ptr
    %29 = llvm.load %arg2 : !llvm.ptr -> i32
    %30 = llvm.intr.smax(%29, %1) : (i32, i32) -> i32
    %31 = llvm.intr.smin(%30, %0) : (i32, i32) -> i32
    %32 = llvm.sext %31 : i32 to i64
    %33 = llvm.icmp "eq" %32, %13 : i64
    llvm.cond_br %33, ^bb3, ^bb4
  ^bb3:  // pred: ^bb2
    llvm.br ^bb5
  ^bb4:  // pred: ^bb2
    %34 = llvm.load %14 : !llvm.ptr -> f32
    llvm.store %34, %arg2 : f32, !llvm.ptr
    llvm.store %3, %15 : f32, !llvm.ptr
    %35 = llvm.trunc %17 : i64 to i32
    llvm.store %35, %16 : i32, !llvm.ptr
    %36 = llvm.ptrtoint %arg2 : !llvm.ptr to i64
    llvm.call @_mlir_ciface_pbk_trace(%6, %7, %36) : (i64, i64, i64) -> ()
    %37 = llvm.ptrtoint %15 : !llvm.ptr to i64
    llvm.call @_mlir_ciface_pbk_trace(%6, %8, %37) : (i64, i64, i64) -> ()
    %38 = llvm.ptrtoint %16 : !llvm.ptr to i64
    llvm.call @_mlir_ciface_pbk_trace(%6, %9, %38) : (i64, i64, i64) -> ()
    llvm.br ^bb5
  ^bb5:  // 2 preds: ^bb3, ^bb4
    %39 = llvm.load %20 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
    %40 = llvm.fmul %39, %11 {fastmathFlags = #llvm.fastmath<contract>} : vector<8xf32>
    %41 = llvm.getelementptr %arg1[%19] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    llvm.store %40, %41 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
    %42 = llvm.add %17, %12 : i64
    llvm.br ^bb1(%42 : i64)
  ^bb6:  // pred: ^bb1
    llvm.return
  }
  llvm.func @pbk_task0(%arg0: !llvm.ptr, %arg1: i64, %arg2: i64, %arg3: i64) attributes {sym_visibility = "private"} {
    %0 = llvm.getelementptr %arg0[0] : (!llvm.ptr) -> !llvm.ptr, i8
    %1 = llvm.load %0 : !llvm.ptr -> !llvm.ptr
    %2 = llvm.getelementptr %arg0[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %3 = llvm.load %2 : !llvm.ptr -> !llvm.ptr
    %4 = llvm.getelementptr %arg0[16] : (!llvm.ptr) -> !llvm.ptr, i8
    %5 = llvm.load %4 : !llvm.ptr -> !llvm.ptr
    %6 = llvm.mlir.constant(256 : i64) : i64
    %7 = llvm.mul %arg3, %6 : i64
    %8 = llvm.getelementptr %5[%7] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    llvm.call @k0_body(%1, %3, %8, %arg1, %arg2) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64) -> ()
    llvm.return
  }
  llvm.func @pbk_main(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: !llvm.ptr) {
    %0 = llvm.mlir.constant(1 : i64) : i64
    %1 = llvm.alloca %0 x !llvm.array<3 x ptr> : (i64) -> !llvm.ptr
    %2 = llvm.getelementptr %arg2[0] : (!llvm.ptr) -> !llvm.ptr, i8
    %3 = llvm.getelementptr %arg1[0] : (!llvm.ptr) -> !llvm.ptr, i8
    %4 = llvm.load %3 : !llvm.ptr -> !llvm.ptr
    %5 = llvm.getelementptr %arg1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %6 = llvm.load %5 : !llvm.ptr -> !llvm.ptr
    %7 = llvm.getelementptr %1[0] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %4, %7 : !llvm.ptr, !llvm.ptr
    %8 = llvm.getelementptr %1[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %6, %8 : !llvm.ptr, !llvm.ptr
    %9 = llvm.getelementptr %1[16] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %2, %9 : !llvm.ptr, !llvm.ptr
    %10 = llvm.mlir.constant(4 : i64) : i64
    %11 = llvm.mlir.constant(0 : i64) : i64
    llvm.call @pbk_task0(%1, %11, %10, %11) : (!llvm.ptr, i64, i64, i64) -> ()
    llvm.return
  }
  llvm.func @_mlir_ciface_pbk_parallel(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64) attributes {sym_visibility = "private"}
  llvm.func @_mlir_ciface_pbk_huge(!llvm.ptr, i64) attributes {sym_visibility = "private"}
  llvm.func @_mlir_ciface_pbk_acquire(!llvm.ptr, i64, i64, !llvm.ptr) -> i64 attributes {sym_visibility = "private"}
  llvm.func @_mlir_ciface_pbk_release(!llvm.ptr, !llvm.ptr, i64) attributes {sym_visibility = "private"}
  llvm.mlir.global internal @pbk_pool() {addr_space = 0 : i32, alignment = 64 : i64} : !llvm.array<128 x i64> {
    %0 = llvm.mlir.zero : !llvm.array<128 x i64>
    llvm.return %0 : !llvm.array<128 x i64>
  }
  llvm.func @pbk_run(%arg0: !llvm.ptr, %arg1: !llvm.ptr) attributes {sym_visibility = "private"} {
    %0 = llvm.mlir.constant(1 : i64) : i64
    %1 = llvm.mlir.constant(4096 : i64) : i64
    %2 = llvm.mlir.constant(4096 : i64) : i64
    %3 = llvm.mlir.addressof @pbk_pool : !llvm.ptr
    %4 = llvm.alloca %0 x !llvm.ptr : (i64) -> !llvm.ptr
    %5 = llvm.call @_mlir_ciface_pbk_acquire(%3, %1, %2, %4) : (!llvm.ptr, i64, i64, !llvm.ptr) -> i64
    %6 = llvm.load %4 : !llvm.ptr -> !llvm.ptr
    llvm.call @pbk_main(%arg0, %arg1, %6) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()
    llvm.call @_mlir_ciface_pbk_release(%3, %6, %5) : (!llvm.ptr, !llvm.ptr, i64) -> ()
    llvm.return
  }
  llvm.func @pbk_call(%arg0: !llvm.ptr) {
    %0 = llvm.mlir.zero : !llvm.ptr
    llvm.call @pbk_run(%0, %arg0) : (!llvm.ptr, !llvm.ptr) -> ()
    llvm.return
  }
  llvm.func @pbk_handler(%arg0: !llvm.ptr) -> !llvm.ptr {
    %0 = llvm.mlir.constant(1 : i64) : i64
    %1 = llvm.mlir.zero : !llvm.ptr
    %2 = llvm.alloca %0 x !llvm.array<2 x ptr> : (i64) -> !llvm.ptr
    %3 = llvm.getelementptr %arg0[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %4 = llvm.load %3 : !llvm.ptr -> !llvm.ptr
    %5 = llvm.icmp "ne" %4, %1 : !llvm.ptr
    llvm.cond_br %5, ^bb1, ^bb2
  ^bb1:  // pred: ^bb0
    %6 = llvm.getelementptr %4[8] : (!llvm.ptr) -> !llvm.ptr, i8
    %7 = llvm.load %6 : !llvm.ptr -> i32
    %8 = llvm.mlir.constant(1 : i32) : i32
    %9 = llvm.icmp "eq" %7, %8 : i32
    llvm.br ^bb3(%9 : i1)
  ^bb2:  // pred: ^bb0
    %10 = llvm.mlir.constant(false) : i1
    llvm.br ^bb3(%10 : i1)
  ^bb3(%11: i1):  // 2 preds: ^bb1, ^bb2
    llvm.br ^bb4
  ^bb4:  // pred: ^bb3
    llvm.cond_br %11, ^bb5, ^bb6
  ^bb5:  // pred: ^bb4
    %12 = llvm.getelementptr %4[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %13 = llvm.load %12 : !llvm.ptr -> !llvm.ptr
    %14 = llvm.mlir.constant(0 : i32) : i32
    %15 = llvm.mlir.constant(3 : i32) : i32
    %16 = llvm.mlir.constant(0 : i32) : i32
    %17 = llvm.mlir.constant(0 : i64) : i64
    %18 = llvm.getelementptr %13[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %19 = llvm.getelementptr %13[28] : (!llvm.ptr) -> !llvm.ptr, i8
    %20 = llvm.getelementptr %13[32] : (!llvm.ptr) -> !llvm.ptr, i8
    %21 = llvm.getelementptr %13[40] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %14, %18 : i32, !llvm.ptr
    llvm.store %15, %19 : i32, !llvm.ptr
    llvm.store %16, %20 : i32, !llvm.ptr
    llvm.store %17, %21 : i64, !llvm.ptr
    llvm.br ^bb7
  ^bb6:  // pred: ^bb4
    %22 = llvm.getelementptr %arg0[72] : (!llvm.ptr) -> !llvm.ptr, i8
    %23 = llvm.load %22 : !llvm.ptr -> !llvm.ptr
    %24 = llvm.getelementptr %arg0[112] : (!llvm.ptr) -> !llvm.ptr, i8
    %25 = llvm.load %24 : !llvm.ptr -> !llvm.ptr
    %26 = llvm.getelementptr %23[0] : (!llvm.ptr) -> !llvm.ptr, i8
    %27 = llvm.load %26 : !llvm.ptr -> !llvm.ptr
    %28 = llvm.getelementptr %27[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %29 = llvm.load %28 : !llvm.ptr -> !llvm.ptr
    %30 = llvm.getelementptr %2[0] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %29, %30 : !llvm.ptr, !llvm.ptr
    %31 = llvm.getelementptr %25[0] : (!llvm.ptr) -> !llvm.ptr, i8
    %32 = llvm.load %31 : !llvm.ptr -> !llvm.ptr
    %33 = llvm.getelementptr %32[24] : (!llvm.ptr) -> !llvm.ptr, i8
    %34 = llvm.load %33 : !llvm.ptr -> !llvm.ptr
    %35 = llvm.getelementptr %2[8] : (!llvm.ptr) -> !llvm.ptr, i8
    llvm.store %34, %35 : !llvm.ptr, !llvm.ptr
    llvm.call @pbk_run(%arg0, %2) : (!llvm.ptr, !llvm.ptr) -> ()
    llvm.br ^bb7
  ^bb7:  // 2 preds: ^bb5, ^bb6
    llvm.return %1 : !llvm.ptr
  }
}

